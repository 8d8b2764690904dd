"""The receiving end of `/update_weights_from_distributed`, as in SGLang's sources: sessions, and a group that torch
makes and reads. Calls are served one after another, as by its scheduler: one that hangs holds up all others."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"
TIMEOUT = timedelta(minutes=30)
"""SGLang waits as long: only a broken connection ends its waits sooner."""


class Receiving:
    def __init__(self) -> None:
        self.session, self.groups, self.updates = False, dict[str, list[Any]](), 0
        self.too_old = False
        """It has no sessions, as versions of SGLang before them."""
        self.unreachable = False
        """It cannot connect to the sender, and goes on trying."""
        self.refuses_at = self.dies_at = self.stops_at = 0
        """Number of the update that it refuses, is killed by, or stops at (SIGSTOP); 0: none."""
        self._scheduler = threading.Lock()
        self.calls = {
            INIT: self._init,
            DESTROY: self._destroy,
            BEGIN: self._begin,
            UPDATE: self._update,
            END: self._end,
        }

    def wait_for_scheduler(self) -> None:
        with self._scheduler:
            return

    def call(self, path: str, body: dict[str, Any], *, paused: bool) -> tuple[str, Mapping[str, torch.Tensor]]:
        """Return why it is refused, or nothing, and the tensors that came."""
        with self._scheduler:
            if path == UPDATE and not paused:
                return "requests are running", {}
            return self.calls[path](body)

    def _init(self, body: dict[str, Any]) -> tuple[str, Mapping[str, torch.Tensor]]:
        name, world, first = body["group_name"], body["world_size"], body["rank_offset"]
        while self.unreachable:
            time.sleep(0.01)
        try:
            if name in self.groups:
                return "the group name has already been created", {}
            init = f"tcp://{body['master_address']}:{body['master_port']}"
            store, _, _ = next(c10d.rendezvous(init, first, world, timeout=TIMEOUT))
            store = dist.PrefixStore(name, store)
            more = [(body, rank) for rank in range(first + 1, world)]
            others = [threading.Thread(target=self._join, args=each) for each in more]
            self.groups[name] = []
            for thread in others:
                thread.start()
            group, _ = c10d._new_process_group_helper(
                world, first, [], c10d.Backend(body["backend"]), store, group_name=name, timeout=TIMEOUT
            )
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
            for thread in others:
                thread.join()
            self.groups[name].insert(0, group)
        except (RuntimeError, ValueError) as error:
            return f"Failed to initialize custom process group: {error}.", {}
        return "", {}

    def _join(self, body: dict[str, Any], rank: int) -> None:
        """One more process of tensor parallelism, here a thread, for which torch has no second group of this name."""
        name = body["group_name"]
        keys: dist.Store = dist.TCPStore(body["master_address"], body["master_port"], wait_for_workers=False)
        for prefix in (name, f"{name}/", "cpu/"):
            keys = dist.PrefixStore(prefix, keys)
        self.groups[name].append(dist.ProcessGroupGloo(keys, rank, body["world_size"], TIMEOUT))

    def _destroy(self, body: dict[str, Any]) -> tuple[str, Mapping[str, torch.Tensor]]:
        groups = self.groups.pop(body["group_name"], [])
        if not groups:
            return "The group to be destroyed does not exist.", {}
        dist.destroy_process_group(groups[0])
        return "", {}

    def _begin(self, body: dict[str, Any]) -> tuple[str, Mapping[str, torch.Tensor]]:
        if self.session:
            return "a weight-update session is already open", {}
        self.session = True
        return "", {}

    def _end(self, body: dict[str, Any]) -> tuple[str, Mapping[str, torch.Tensor]]:
        if not self.session:
            return "no weight-update session is open", {}
        self.session = False
        return "", {}

    def _update(self, body: dict[str, Any]) -> tuple[str, Mapping[str, torch.Tensor]]:
        if not self.session:
            return "it must run between begin_weight_update() and end_weight_update()", {}
        if body["load_format"] != "flattened_bucket" or body.get("flush_cache", True):
            return "this contract has neither other formats nor an empty batch to flush", {}
        self.updates += 1
        if self.updates == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.updates == self.stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.updates == self.refuses_at:
            return "Failed to update parameter online", {}
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)]
        first, *others = self.groups[body["group_name"]]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        copies = [torch.empty_like(data) for _ in others]
        works = [group.broadcast(copy, 0) for group, copy in zip(others, copies, strict=True)]
        try:
            dist.broadcast(data, src=0, group=first)
            for work in works:
                work.wait()
        except RuntimeError as error:
            return f"Failed to receive weights: {error}", {}
        assert all(torch.equal(data, copy) for copy in copies)
        parts = zip(body["names"], data.split(sizes), dtypes, body["shapes"], strict=True)
        return "", {name: part.clone().view(dtype).view(shape) for name, part, dtype, shape in parts}
