"""Open a page in headless Chromium, if it is installed, by the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_S = 60.0


def chromium() -> str | None:
    """Return the path of the program; None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One window. Every request waits for its answer, `WAIT_S` seconds at most."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = to, of
        self._read, self._last, self._session = b"", 0, ""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]

    def open(self, page: Path) -> None:
        """Begin to load `page`."""
        self._ask("Page.navigate", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Run `script` and return the value of its promise.

        Raises:
            RuntimeError: the script threw, or the browser is gone.
            TimeoutError: the script did not end in time.
        """
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        said = self._ask("Runtime.evaluate", asked)
        if "exceptionDetails" in said:
            raise RuntimeError(str(said["exceptionDetails"]))
        return said["result"].get("value")

    def _ask(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + WAIT_S
        while True:
            said = json.loads(self._next(until))
            if said.get("id") == self._last:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return said["result"]

    def _next(self, until: float) -> bytes:
        while b"\0" not in self._read:
            if not select.select([self._of], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser did not answer")
            part = os.read(self._of, 1 << 20)
            if not part:
                raise RuntimeError("the browser is gone")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return message


@contextlib.contextmanager
def browser(folder: Path, *, width: int = 1280) -> Iterator[Browser]:
    """Start Chromium with its profile in `folder` and a window `width` pixels wide. Stops it at the end."""
    read_by_it, to = os.pipe()
    of, written_by_it = os.pipe()
    command = [
        str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
        f"--user-data-dir={folder}", f"--window-size={width},900",
    ]  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{read_by_it} 4>&{written_by_it}', "bash", *command],
        pass_fds=(read_by_it, written_by_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Browser(to, of)
    finally:
        os.close(to)  # the browser ends when this pipe closes
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(of)
