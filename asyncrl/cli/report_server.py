"""`asyncrl report RUN ... --serve`: serves the page to browsers on this machine, rebuilt when a run has written more.

Only users who know the address can read it: it contains a random token, and must be requested by a loopback host name,
so that the page of another site whose name resolves to this machine cannot get it.

consumes:     requests, files of the runs
waits for:    the next request, without a deadline; a connection that is silent for `IDLE_S` is closed
unblocked by: a request, Ctrl-C, SIGTERM
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from asyncrl.errors import AsyncRLError
from asyncrl.http_server import Answers, HttpServer
from asyncrl.telemetry.metrics.log import EVAL_SAMPLES_FILE, HISTOGRAMS_FILE, METRICS_FILE, SAMPLES_FILE
from asyncrl.telemetry.metrics.raised import ALARMS_FILE
from asyncrl.telemetry.reports.page import page_of

LOOPBACK = "127.0.0.1"
AGAIN_S = 15
"""Seconds between two checks of the browser for new data."""
IDLE_S = 60.0
FILES = (METRICS_FILE, HISTOGRAMS_FILE, ALARMS_FILE, SAMPLES_FILE, EVAL_SAMPLES_FILE)
AGAIN = """<script>
"use strict";
let tag = null;  // of the first answer
setInterval(async () => {
  const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" }).catch(() => null);
  const now = answer && answer.ok ? answer.headers.get("ETag") : null;
  const searched = [...document.querySelectorAll("input[type=search]")].some(box => box.value);
  if (now && tag && now !== tag && !searched) location.reload();
  else tag ??= now;
}, %d);
</script>
"""
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Headers that keep other sites and caches from the page."""
State = tuple[tuple[int, int, int], ...]


class CurrentPage:
    """The page of some runs, current at the time of a request; one request rebuilds it while others wait."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises RunFolderError."""
        self._folders = folders
        self._lock = threading.Lock()
        self._state = self._now()
        self._text = self._made()

    def _made(self) -> bytes:
        return kept_current(page_of(self._folders)).encode()

    def tag(self) -> str:
        """Return a tag of the files' current state: if it differs, so does the page."""
        return tag_of(self._now())

    def text(self) -> tuple[str, bytes]:
        """Return the page's tag and the page. Raises AsyncRLError, OSError."""
        with self._lock:
            state = self._now()
            if state != self._state:
                self._text, self._state = self._made(), state
            return tag_of(state), self._text

    def _now(self) -> State:
        return tuple(_state(folder / name) for folder in self._folders for name in FILES)


def kept_current(page: str) -> str:
    """Return the page with a script that reloads it if there is new data, but not during a search in it."""
    allowed = page.replace("default-src 'none';", "default-src 'none'; connect-src 'self';", 1)
    head, end, rest = allowed.rpartition("</body>")
    return f"{head}{AGAIN % (AGAIN_S * 1000)}{end}{rest}"


def tag_of(state: State) -> str:
    return "-".join(str(number) for file in state for number in file)


def _state(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


class ReportServer(HttpServer):
    """HTTP server on loopback only, at a free port."""

    def __init__(self, page: CurrentPage) -> None:
        """Raises OSError."""
        self.page, self.token = page, secrets.token_urlsafe(32)
        super().__init__((LOOPBACK, 0), _Answers)

    @property
    def url(self) -> str:
        return f"{super().url}/{self.token}/"


class _Answers(Answers):
    server: ReportServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        body = self.command == "GET"
        port = self.server.server_port
        named = self.headers.get_all("Host", []) in ([f"{LOOPBACK}:{port}"], [f"localhost:{port}"])
        given = self.path.encode("latin-1", "replace")
        if not named or not secrets.compare_digest(given, f"/{self.server.token}/".encode()):
            self._send(403, b"Not for you: the whole address is in the terminal of `asyncrl report --serve`\n")
            return
        try:
            tag, text = self.server.page.text() if body else (self.server.page.tag(), b"")
        except (AsyncRLError, OSError) as error:
            self._send(503, f"{error}\n".encode(errors="replace"))
            return
        self._send(200, text, tag)

    do_HEAD = do_GET

    def _send(self, code: int, text: bytes, tag: str = "") -> None:
        kind = {"Content-Type": "text/html; charset=utf-8" if code == 200 else "text/plain; charset=utf-8"}
        self.say(code, text, kind | SAFE | ({"ETag": f'"{tag}"'} if tag else {}))


def serve(folders: Sequence[Path]) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises RunFolderError, OSError."""
    with ReportServer(CurrentPage(folders)) as server:
        print(
            f"{server.url}\nIt is updated until Ctrl-C. Anyone on this machine who knows the address can read it",
            flush=True,
        )
        before = signal.signal(signal.SIGTERM, _end)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended: the page is not served any more")
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
