"""What the small HTTP servers of asyncrl (retriever, report, published weights) have in common."""

from __future__ import annotations

import socketserver
import sys
from http.server import ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without HTTPServer's look for this machine's name, which may take seconds where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked and went away is no error: it knows best what it misses."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]
