"""The event loop's side of one child process with a user's function: start, send, answers, progress, death."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from asyncrl.errors import WireError
from asyncrl.rewards.wire import IDLE, PROGRESS_BYTES, FrameBuffer, Progress, read_progress
from asyncrl.utils.process_tree import describe_exit

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


def surroundings() -> dict[str, str]:
    """Environment variables of a process that runs user code: it finds this package and the working directory."""
    paths = [str(PACKAGE_PARENT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


class FunctionProcess(asyncio.SubprocessProtocol):
    """`on_message(process, message)` for each frame; `on_death(process, description)` exactly once, at its end."""

    def __init__(
        self, on_message: Callable[[FunctionProcess, list[Any]], None], on_death: Callable[[FunctionProcess, str], None]
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._buffer = FrameBuffer()
        self._unsent: list[bytes] = []
        self._transport: asyncio.SubprocessTransport | None = None
        with tempfile.TemporaryFile() as file:
            file.truncate(PROGRESS_BYTES)
            self._progress = mmap.mmap(file.fileno(), PROGRESS_BYTES)
            self._progress_fd = os.dup(file.fileno())
        self.ready = False
        self.dead = False
        self.overdue = IDLE
        """The call past its deadline for which the process was killed."""
        self.heard_at = time.monotonic()
        """Time when it was started, last answered, or given work after having none."""
        self.outstanding: dict[int, Any] = {}
        """Calls sent or about to be sent, by id, in order."""

    async def start(self, kind: str, what: str, timeout_s: float, at_once: int) -> None:
        loop = asyncio.get_running_loop()
        settings = (kind, what, str(timeout_s), str(at_once), str(self._progress_fd), str(os.getpid()))
        command = [sys.executable, "-m", "asyncrl.rewards.child", *settings]
        try:
            await loop.subprocess_exec(
                lambda: self,
                *command,
                stderr=None,
                pass_fds=(self._progress_fd,),
                # A process group of its own: processes that the reward starts are killed with it, and Ctrl-C does not
                # reach it.
                start_new_session=True,
                env=surroundings(),
            )
        finally:
            os.close(self._progress_fd)

    def send(self, call_id: int, call: Any, frame: bytes) -> None:
        """Queue a call; all calls of one iteration of the loop are sent in one write."""
        if not self.outstanding:
            self.heard_at = time.monotonic()
        self.outstanding[call_id] = call
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def progress(self) -> Progress:
        """What the process is doing now."""
        return read_progress(self._progress)

    def kill(self) -> None:
        """SIGKILL the process and all that it started; `on_death` follows."""
        if self._transport is None or self.dead:
            return
        pid = self._transport.get_pid()
        with contextlib.suppress(ProcessLookupError):  # already gone with its whole group
            os.killpg(pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.heard_at = time.monotonic()
        try:
            for message in self._buffer.feed(data):
                self._on_message(self, message)
        except WireError:  # only user code that wrote into our pipe can cause it: this child cannot be trusted
            self.kill()

    def process_exited(self) -> None:
        # A surviving grandchild would hold the pipe open, and `connection_lost` would never be called.
        self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self.dead = True
        code = self._transport.get_returncode()
        self._on_death(self, describe_exit(code))

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self.dead or self._transport is None:
            return
        pipe = self._transport.get_pipe_transport(0)
        if pipe is not None and not pipe.is_closing():
            cast(asyncio.WriteTransport, pipe).write(data)
