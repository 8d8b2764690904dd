"""The worker's side of the process in which episodes of verifiers run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import EpisodeError
from asyncrl.utils.process_tree import REAP_S, describe_exit, kill, marked

log = logging.getLogger(__name__)

MODULE = "asyncrl.environments.verifiers.host"
START_S = 600.0
"""Seconds for servers of a taskset to start."""
STOP_S = 15.0
"""Seconds for servers and sandboxes to be shut down."""
LINE_BYTES = 64 << 20
MARK = "ASYNCRL_VERIFIERS"
"""Environment variable inherited by everything that a taskset or harness starts, in sessions of its own."""


def surroundings(path: str) -> dict[str, str]:
    """Environment variables of a process that also finds packages in the folder `path`."""
    found = [each for each in (path, os.environ.get("PYTHONPATH", "")) if each]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)} if found else dict(os.environ)


class Hosted:
    """The process, started with the first episode, and again if it ended.

    Args:
        settings: see `host.built`.
        path: folder with packages of tasksets and harnesses.
    """

    def __init__(self, settings: Mapping[str, Any], path: str) -> None:
        self._settings, self._path = json.dumps(dict(settings)), path
        self._starting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._mark = uuid.uuid4().hex

    async def run(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Run one episode; returns `score` and `parts`.

        Args:
            episode: `task`, `url`, `key` and `model`.

        Raises:
            EpisodeError: it failed, or the process ended.
        """
        await self._started()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._write({"id": number, **episode})
            said = await answer
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            self._open.pop(number, None)
        if "error" in said:
            raise EpisodeError(str(said["error"]))
        return said

    async def _started(self) -> None:
        """Start it once for all episodes that need it. It goes on for the next ones if these are given up: ended with
        them, a process that starts more slowly than `environment.timeout_s` would never be there."""
        if self._reading is not None and not self._reading.done():
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        """waits for: the process's first line; unblocked by: that, its end, or START_S."""
        await self._end_leftovers()
        arguments = (sys.executable, "-m", MODULE, self._settings)
        pipe, env = asyncio.subprocess.PIPE, surroundings(self._path) | {MARK: self._mark}
        self._process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, env=env, limit=LINE_BYTES
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            raise EpisodeError(f"verifiers did not start within {START_S:g} s") from None
        said = json.loads(line) if line else {}
        if "ready" not in said:
            code = await self._process.wait()
            raise EpisodeError(str(said.get("refused") or f"verifiers ended ({describe_exit(code)})"))
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """consumes: answers; waits for: the next; unblocked by: it, or the end of the process."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                said = json.loads(line)
                answer = self._open.get(said.get("id", 0))
                if answer is not None and not answer.done():
                    answer.set_result(said)
        except ValueError as error:  # a line too long or invalid: the rest has no meaning
            log.warning("verifiers sent an invalid answer, and is ended: %s", error)
            process.kill()
        why = f"the process of verifiers ended ({describe_exit(await process.wait())})"
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(EpisodeError(why))
        await self._end_leftovers()

    async def _end_leftovers(self) -> None:
        """Kill what the process started and did not end: it was killed, or forgot it.

        waits for: their ends; unblocked by: those, or REAP_S.
        """
        deadline = time.monotonic() + REAP_S
        while (left := marked(self._mark, MARK)) and time.monotonic() < deadline:
            for each in left:
                kill(each)
            await asyncio.sleep(0.05)

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        # Messages to a process that has ended are lost: `_read` fails the episodes that wait.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")

    async def close(self) -> None:
        """waits for: the process to end; unblocked by: its end, or STOP_S."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            log.warning("verifiers did not end within %g s and is killed", STOP_S)
            process.kill()
            await process.wait()
        if self._reading is not None:
            await self._reading
        await self._end_leftovers()
