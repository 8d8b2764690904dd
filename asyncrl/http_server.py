"""Bases of asyncrl's small HTTP servers (retriever, report, published weights) and of their answers."""

from __future__ import annotations

import socketserver
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Skips HTTPServer's lookup of this machine's name, which can take seconds if no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, with the address that it listens on."""
        return f"http://{f'[{self.server_name}]' if ':' in self.server_name else self.server_name}:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects is not an error worth a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: a short body would wait for the ack of the head
    server_version, sys_version = "asyncrl", ""

    def say(self, code: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer; to HEAD, which asks for no body, without one."""
        self.send_response(code)
        length = {} if self.command == "HEAD" else {"Content-Length": str(len(body))}
        for name, value in {**length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if length:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line per request is of no use, and an address may contain a token."""
