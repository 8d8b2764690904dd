"""Base of asyncrl's small HTTP servers (retriever, report, published weights)."""

from __future__ import annotations

import socketserver
import sys
from http.server import ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Skips HTTPServer's lookup of this machine's name, which can take seconds if no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects is not an error worth a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]
