"""The worker's side of `host`: one process with the tools, and sessions of it that run them under a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from asyncrl.chat.base import ToolSpec
from asyncrl.environments.tools.calling import Call
from asyncrl.errors import ConfigError, EpisodeError, WireError
from asyncrl.rewards.process import surroundings
from asyncrl.rewards.wire import FrameBuffer, pack_frame
from asyncrl.utils.process_tree import describe_exit

START_S = 120.0
"""Seconds for the host to import the functions, and for a session to be forked, on a busy machine."""
READ_BYTES = 1 << 16


class ToolHost:
    """Starts the process and waits until it has imported the functions. It is restarted if it was lost.

    Raises:
        ConfigError: one of the functions cannot be used; the message says why.
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self._functions = list(functions)
        self.specs: list[ToolSpec] = []
        self.stateful: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self.start()

    def start(self) -> None:
        """waits for: the import; unblocked by: its end, or START_S."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "asyncrl.environments.tools.host"),
                    *(json.dumps(self._functions), str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=surroundings(),
            )
        self._control = ours
        head, *said = self._first_word(ours)
        if head != "ready":
            self.close()
            raise ConfigError(said[0])
        self.specs, self.stateful = said[0], set(said[1])

    def _first_word(self, control: socket.socket) -> list[Any]:
        control.settimeout(START_S)
        buffer = FrameBuffer()
        names = ", ".join(self._functions)
        try:
            while data := control.recv(READ_BYTES):
                for frame in buffer.feed(data):
                    return frame
        except TimeoutError:
            return ["refused", f"environment.args.functions: importing {names} took more than {START_S:g} s"]
        assert self._process is not None
        how = describe_exit(self._process.wait(START_S))
        return ["refused", f"environment.args.functions: importing {names} ended its process ({how})"]

    async def open(self) -> Session:
        """Open a new session. Raises EpisodeError if that fails."""
        async with self._starting:
            assert self._process is not None and self._control is not None
            if self._process.poll() is not None:
                self.close()
                try:
                    await asyncio.to_thread(self.start)
                except ConfigError as error:
                    raise EpisodeError(
                        f"the process of the tools was lost and cannot be started again: {error}"
                    ) from error
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise EpisodeError(f"the process of the tools is gone: {error}") from error
        session = Session(*await asyncio.open_connection(sock=ours))
        await session.begin()
        return session

    def close(self) -> None:
        """End the host, and every session with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Session:
    """One process that runs calls one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = FrameBuffer()
        self._frames: list[list[Any]] = []
        self._numbers = itertools.count()
        self._pid = 0
        self._turn = asyncio.Lock()
        self.dead = False

    async def begin(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                (self._pid,) = await self._frame()
        except (TimeoutError, ConnectionError, WireError) as error:
            self.kill()
            raise EpisodeError(
                f"the process of the tools cannot be started: {type(error).__name__}: {error}"
            ) from error

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> tuple[bool, str]:
        """Return whether the call succeeded, and the text that the policy reads. A call past the deadline is killed."""
        async with self._turn:
            if self.dead:
                return False, "Error: the tools of this episode were ended by an earlier call"
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(pack_frame([next(self._numbers), name, dict(arguments)]))
                    await self._writer.drain()
                    _, done, text = await self._frame()
                    return bool(done), str(text)
            except TimeoutError:
                said = f"the call took longer than {timeout_s:g} s and was ended"
            except ConnectionError:
                said = "the call ended its process"
            except (WireError, ValueError) as error:
                said = f"the call cannot be made: {error}"
            except asyncio.CancelledError:
                self.kill()
                raise
            self.kill()
            return False, f"Error: {said}"

    def kill(self) -> None:
        """SIGKILL the session and all processes that it started. Only once: later the pid may belong to another
        process."""
        self.dead = True
        self._writer.close()
        pid, self._pid = self._pid, 0
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    async def _frame(self) -> list[Any]:
        """Return the next frame. Raises ConnectionError if the process is gone, WireError for an invalid frame."""
        while not self._frames:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise ConnectionError("it is gone")
            self._frames += self._buffer.feed(data)
        return self._frames.pop(0)


class SharedSessions:
    """Sessions for stateless functions: at most `most`, each lent for one call."""

    def __init__(self, host: ToolHost, most: int) -> None:
        self._host = host
        self._free = asyncio.Semaphore(most)
        self._idle: list[Session] = []

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Session]:
        """waits for: a free session; unblocked by: the end of another's call, which has a deadline."""
        async with self._free:
            session = self._idle.pop() if self._idle else await self._host.open()
            try:
                yield session
            finally:
                if not session.dead:
                    self._idle.append(session)


class Functions:
    """The user's typed functions, in separate processes. Implements `calling.Source`.

    Args:
        processes: number of processes in which stateless functions run concurrently.
        timeout_s: limit of one call; past it its process is ended, and the policy is told.

    Raises:
        ConfigError: see `ToolHost`.
    """

    def __init__(self, functions: Sequence[str], processes: int, timeout_s: float) -> None:
        self.host, self.timeout_s = ToolHost(functions), timeout_s
        self._shared = SharedSessions(self.host, processes)
        self.specs = self.host.specs

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Call]:
        own: list[Session] = []
        turn = asyncio.Lock()

        async def call(name: str, arguments: dict[str, Any]) -> str:
            if name not in self.host.stateful:
                async with self._shared.lent() as session:
                    return (await session.call(name, arguments, self.timeout_s))[1]
            async with turn:  # one object per episode: the first call creates its process, all others use it
                if not own:
                    own.append(await self.host.open())
            return (await own[0].call(name, arguments, self.timeout_s))[1]

        try:
            yield call
        finally:
            for session in own:
                session.kill()

    def close(self) -> None:
        self.host.close()
