"""SGLang servers: a version comes to the worker by any transport; each server reads it from a file."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncrl.engines.server.answers import ServerGoneError
from asyncrl.engines.server.engine import PATIENCE_S, ServerEngine
from asyncrl.engines.server.servers import Server
from asyncrl.engines.server.sglang_link import FILE, START_IT, SglangLink
from asyncrl.errors import WeightsError
from asyncrl.schema import Config

RETRY_S = 30.0
"""Seconds until a server that could not load is asked again."""


class SglangServers(ServerEngine):
    """Implements `engines.base.Engine` and `Several`. Args: folder: used by this worker alone; the servers read from
    there."""

    start_it = START_IT

    def __init__(self, config: Config, links: Sequence[SglangLink], folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # left by a previous worker that was killed
        self._current: tuple[int, str] | None = None
        """Version and path that every server should have; given by a load, or when a server arrives."""
        self._given = dict[str, tuple[int, str]]()
        """By URL: the arrival at which a server was given weights, and their path."""
        self._one_load = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._written = 0
        super().__init__(config, links)

    def load_weights(self, policy_version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._parameters.check(tensors)
        path = self._write(policy_version, tensors)
        self._current = policy_version, str(path)  # servers that arrive from now on are given these
        self._loop.call(self._one_is_there(), PATIENCE_S)
        self._load(policy_version, list(self._servers), str(path))
        for old in self._folder.iterdir():
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _arrived(self, server: Server) -> None:
        if self._current is not None:
            try:
                await self._commit_on(server, *self._current)
            except (ServerGoneError, TimeoutError) as error:
                await self._lose(server, str(error) or f"{server.url} gave no answer in time")
        await super()._arrived(server)

    async def _one_is_there(self) -> None:
        """waits for: any server, if all are away just now; unblocked by: its arrival, or PATIENCE_S."""
        with suppress(TimeoutError):  # the load says why there is none
            async with asyncio.timeout(PATIENCE_S - 10.0), self._changed:
                await self._changed.wait_for(lambda: any(server.facts for server in self._servers.values()))

    async def _commit_on(self, server: Server, policy_version: int, path: str) -> None:
        async with self._one_load[server.url]:  # the end of one load would let sequences in during another
            if self._current is not None:
                policy_version, path = self._current
            given = server.arrivals, path
            if self._given.get(server.url) == given:
                return
            try:
                await super()._commit_on(server, policy_version, path)
            except (ServerGoneError, TimeoutError):
                server.not_before = time.monotonic() + RETRY_S
                raise
            self._given[server.url] = given

    def _write(self, policy_version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        self._written += 1  # a version may come twice while the first is still being read
        # With a name that no other run has: a server elsewhere might find what an earlier run left at the same path.
        path = self._folder / f"{self._run}.{policy_version}.{self._written}"
        try:
            path.mkdir(parents=True)
            whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(whole, path / FILE, {"format": "pt"})
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"version {policy_version} could not be written to {path}: {error}") from error
        return path
