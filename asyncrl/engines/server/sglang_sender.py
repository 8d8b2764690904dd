"""Sends a version's file to one SGLang server over gloo, for servers that do not see the worker's folders.

    /init_weights_update_group         a group of this worker (rank 0) and the server's processes, for one version
    /begin_weight_update               a session, without which the server takes no weights
    /update_weights_from_distributed   names of a bucket; its bytes come by a broadcast in the group
    /end_weight_update /destroy_weights_update_group

Each server has a group of its own: in a common one, a server that dies would end the transfer to all. A server whose
sender dies sees a broken connection; the bytes that it has got so far are in its model, under a label that no run asks
for, until it is sent a whole version.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from asyncrl.background import in_background
from asyncrl.checks.servers import connected_at
from asyncrl.engines.server.answers import ServerGoneError
from asyncrl.engines.server.sglang_link import FILE, SglangLink
from asyncrl.engines.server.terms import LOOK_TIMEOUT_S
from asyncrl.errors import AsyncRLError, GenerationError
from asyncrl.loops import together
from asyncrl.schema import Config
from asyncrl.weights.broadcast.group import STRETCH, host_store
from asyncrl.weights.broadcast.wires import GlooWire, Link, address_to_listen

Result = TypeVar("Result")
NAME = "asyncrl"
"""Of the group, the same for every worker: so the next one can end what a killed one left in the server."""
PREFIXES = (NAME, f"{NAME}/", "cpu/")
"""Where torch keeps the keys of such a group in its store: SGLang's own prefix, the group's, and the device's."""
AGAIN_S = 0.01


def buckets(tensors: Mapping[str, torch.Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Yield the names of all tensors, in buckets of at most `most_bytes` or of one longer tensor. Those of wide dtypes
    come first: in a bucket, a tensor begins at a multiple of its element's size."""
    names: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].itemsize):
        if names and size + tensors[name].nbytes > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensors[name].nbytes
    if names:
        yield names


class SglangSender:
    """Sends to the server of `link`, on the loop that the link is used on."""

    def __init__(self, link: SglangLink, config: Config) -> None:
        self._link, self._timeout_s = link, config.weights.timeout_s
        self._bytes = config.weights.bucket_mb << 20
        host = urlsplit(connected_at(link.url)).hostname or ""
        self._store: dist.TCPStore | None = None
        """Where the server is expected; nobody reads from it in another thread."""
        self._end = Link(host=host, timeout_s=self._timeout_s, backend="gloo", interface=config.weights.interface)

    async def send(self, folder: str, label: str) -> None:
        """Give the paused server the weights in `folder`, and the label when it has them all.

        Raises:
            ServerGoneError, GenerationError, ConfigError: it has not taken them; parts of them may be in its model.
        """
        await self._tidy()
        wire = None
        try:
            wire = await self._form()
            await self._link.post("/begin_weight_update", {})
            await self._label(f"{label}.part")
            tensors = load_file(Path(folder) / FILE)  # mapped, not read
            for names in buckets(tensors, self._bytes):
                await self._pass(wire, {name: tensors[name] for name in names})
            await self._link.post("/end_weight_update", {})
            await self._label(label)
        except AsyncRLError:
            raise
        except (RuntimeError, OSError) as error:
            raise ServerGoneError(f"the transfer to {self._link.url} over gloo broke off: {error}") from error
        finally:
            if wire is not None:  # without one, the server may be waiting for it and answer nothing
                wire.abort()
                with suppress(ServerGoneError):
                    await self._tidy()

    def let_go(self) -> None:
        """Close the store that a server has come to too late: that ends its wait, which nothing else does. For one that
        has not come yet it stays open, since where nobody listens a server tries for 30 minutes."""
        if self._came():
            self._store = None

    def _came(self) -> bool:
        return self._store is not None and self._store.num_keys() > 0

    async def _form(self) -> GlooWire:
        """waits for: the server's processes, which connect to a store here; unblocked by: them, the server's refusal,
        or the timeout."""
        host = address_to_listen(self._end)
        self._store, port = host_store(host, self._timeout_s)
        asked = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self._link.width,
            "group_name": NAME,
            "backend": "gloo",
        }
        # Asked for longer than `_join` waits, which knows better what is wrong.
        asking = self._ask("/init_weights_update_group", asked, 2 * self._timeout_s)
        _, wire = await _both(asking, self._join(f"{host}:{port}"))
        return wire

    async def _join(self, where: str) -> GlooWire:
        deadline = time.monotonic() + self._timeout_s
        while not self._came():  # a thread would wait in vain for all of the time
            if time.monotonic() > deadline:
                raise ServerGoneError(
                    f"{self._link.url} has not connected to {where} within {self._timeout_s:g} s. It tries for 30 "
                    "minutes, and answers nobody until then: make that address reachable for it (weights.interface "
                    "names another one of this machine) and restart it, or share run.dir with it and set "
                    "engine.weights=disk"
                )
            await asyncio.sleep(AGAIN_S)
        assert self._store is not None
        of_group: dist.Store = self._store
        self._store = None
        for prefix in PREFIXES:
            of_group = dist.PrefixStore(prefix, of_group)
        return await _on_thread(partial(GlooWire, of_group, self._end, 0, 1 + self._link.width))

    async def _pass(self, wire: GlooWire, tensors: Mapping[str, torch.Tensor]) -> None:
        left_s = self._timeout_s * math.ceil(sum(each.nbytes for each in tensors.values()) / STRETCH)
        body = {
            "names": list(tensors),
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
            "group_name": NAME,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # a flush fails the load while ended sequences are still in a batch
        }
        try:
            await _both(
                self._ask("/update_weights_from_distributed", body, left_s + self._timeout_s),
                _on_thread(partial(_broadcast, wire, list(tensors.values()), left_s)),
            )
        except BaseException:
            wire.abort()  # ends the wait of that thread
            raise

    async def _label(self, label: str) -> None:
        await self._link.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def _tidy(self) -> None:
        """End the session and the group that this worker, or a killed one, left in the server."""
        for path, body in (("/end_weight_update", {}), ("/destroy_weights_update_group", {"group_name": NAME})):
            with suppress(GenerationError):  # there is none
                await self._ask(path, body, min(LOOK_TIMEOUT_S, self._timeout_s))

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._link.ask("POST", path, body, timeout_s=timeout_s)


def _broadcast(wire: GlooWire, tensors: Sequence[torch.Tensor], left_s: float) -> None:
    data = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors])
    wire.wait(wire.broadcast(data, left_s), left_s)


async def _on_thread(call: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(in_background("weights-gloo", call))


async def _both(one: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> list[Any]:
    return await together(asyncio.create_task(one), asyncio.create_task(other))
