"""The learner's HTTP server of published files: a client with the token may read them, whole or from an offset on.

consumes:     GET /NAME, with `Authorization: Bearer TOKEN` and, to resume a broken transfer, `Range: bytes=N-`
waits for:    the head of a request, `idle_s` in total; a peer that reads nothing for as long is disconnected
unblocked by: requests, `close`
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from asyncrl.errors import WeightsError
from asyncrl.http_server import Answers, HttpServer
from asyncrl.weights.files.items import is_name

CONNECTIONS = 256
_FROM = re.compile(r"bytes=(\d+)-")


class FilesServer(HttpServer):
    """Serves from its construction to `close`, on threads of its own.

    Args:
        port: 0 takes any free port.
        idle_s: a file that was read within that time still counts as being read, since a broken transfer is resumed.

    Raises:
        WeightsError: it cannot listen at that address.
    """

    request_queue_size = CONNECTIONS
    """All workers connect when a new version appears; one that does not fit into the queue waits for seconds."""

    def __init__(self, folder: Path, host: str, port: int = 0, idle_s: float = 60.0) -> None:
        self.folder, self.idle_s, self.token = folder, idle_s, secrets.token_urlsafe(32)
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._read_at: dict[str, float] = {}
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Answers)
            self.server_name = host  # as it was given: other machines may know it by another address
        except OSError as error:
            raise WeightsError(
                f"weights.host={host} weights.port={port}: the learner cannot serve its weights there: {error}. Name "
                "an address of its machine and a free port; weights.port=0 takes any"
            ) from error
        serving = partial(self.serve_forever, poll_interval=0.05)  # how long `close` waits for it
        threading.Thread(target=serving, name="weights-server", daemon=True).start()

    def reads(self, name: str) -> bool:
        """Whether the file is being read, or was within `idle_s`."""
        with self._lock:
            return self._open[name] > 0 or time.monotonic() - self._read_at.get(name, -self.idle_s) < self.idle_s

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        with self._lock:
            self._open[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[name] -= 1
                self._read_at[name] = time.monotonic()
                for old in [old for old, at in self._read_at.items() if time.monotonic() - at > self.idle_s]:
                    del self._read_at[old]

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Answers(Answers):
    server: FilesServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.idle_s)

    def handle_one_request(self) -> None:
        """Handle one request, with a deadline for its whole head: a client that sends one byte at a time would
        otherwise occupy a slot without limit."""
        self._late = threading.Timer(self.server.idle_s, self._cut)
        self._late.daemon = True
        self._late.start()
        try:
            super().handle_one_request()
        finally:
            self._late.cancel()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._late.cancel()
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        name = self.path.removeprefix("/")
        if not secrets.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self.say(401)
        elif not is_name(name):
            self.say(404)
        else:
            with self.server.reading(name):
                self._send(self.server.folder / name)

    def _send(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except OSError:
            self.say(404)
            return
        with file:
            size, asked = os.fstat(file.fileno()).st_size, self.headers.get("Range", "")
            found = _FROM.fullmatch(asked)
            start = int(found.group(1)) if found else 0
            if found and start >= size:
                self.say(416)
                return
            self.send_response(206 if found else 200)
            if found:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            self.wfile.flush()
            if size > start:
                self.connection.sendfile(file, start)
