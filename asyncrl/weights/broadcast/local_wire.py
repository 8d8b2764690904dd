"""The communicator within one machine: rank 0 publishes the handle of a piece, and the others copy it from there.

    all      here/rank: process and machine; formed: all have arrived
    rank 0   piece/n: a handle (`weights.ipc`) -------------------------------> done/n
    others             open, copy, taken/n + 1; the last of them: done/n ------^

Each end watches the processes of the others: a death is noticed at once, a silence after the deadline of the group.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights.broadcast.forming import Forming
from asyncrl.weights.broadcast.protocol import fetch, post, wait_key
from asyncrl.weights.ipc import Opened, export, machine

_PIECE = 16 << 20
"""Bytes per piece: a message costs a few hundred microseconds at both ends, and a piece is hashed while the next
arrives."""
_LOOK_S = 0.1
"""Seconds between two checks of the other processes."""


class LocalWire:
    """Implements `wires.Wire`.

    Raises:
        RuntimeError: the others did not arrive in time, or are on another machine.
    """

    piece_bytes = _PIECE

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float, forming: Forming) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._number = 0
        self._opened = Opened()
        self._given: dict[int, list[Any]] = {}
        self._left = threading.Event()
        self._others: dict[int, int] = {}
        """Process descriptors of the ranks that are waited for."""
        deadline, here = time.monotonic() + timeout_s, machine()
        post(store, f"here/{rank}", [os.getpid(), here])
        try:
            for other in range(1, world) if rank == 0 else (0,):
                forming.wait_key(store, f"here/{other}", deadline, f"rank {other} to share memory")
                pid, there = fetch(store, f"here/{other}")
                if there != here:
                    raise RuntimeError(f"rank {other} is on another machine or in another container: {OTHER_MACHINE}")
                self._others[other] = _process(int(pid), other)
            if rank == 0:
                store.set("formed", "")
            else:  # all or none: a rank that joined alone would wait for events that never come
                self._until("formed", max(deadline - time.monotonic(), 0.0))
        except RuntimeError:
            self.abort()
            raise

    def broadcast(self, buffer: torch.Tensor, left_s: float) -> Any:
        self._number += 1
        if self._rank == 0:
            post(self._store, f"piece/{self._number}", export(buffer, self._given))
        return self._number, buffer

    def wait(self, work: Any, left_s: float) -> None:
        number, buffer = work
        if self._rank == 0:
            self._until(f"done/{number}", left_s)
            for key in ("piece", "taken", "done"):
                self._store.delete_key(f"{key}/{number}")
            return
        self._until(f"piece/{number}", left_s)
        there = self._opened.tensor(fetch(self._store, f"piece/{number}"))
        if len(there) != len(buffer):
            raise RuntimeError(f"received a piece of {len(there)} bytes, expected {len(buffer)}")
        buffer.copy_(there)
        if there.device.type == "cuda":
            torch.cuda.current_stream(there.device).synchronize()  # rank 0 may overwrite it as soon as it is told
        if self._store.add(f"taken/{number}", 1) == self._world - 1:
            self._store.set(f"done/{number}", "")

    def abort(self) -> None:
        if self._left.is_set():
            return
        self._left.set()
        with suppress(RuntimeError):  # the store has gone with rank 0, which the others notice themselves
            self._store.set("over", "")
        for descriptor in self._others.values():
            os.close(descriptor)

    def _until(self, key: str, left_s: float) -> None:
        deadline = time.monotonic() + left_s
        while not wait_key(self._store, key, min(_LOOK_S, max(deadline - time.monotonic(), 0.0)), self._left):
            if self._left.is_set() or self._store.check(["over"]):
                raise RuntimeError("another member has left")
            watched = select.poll()
            for descriptor in self._others.values():
                watched.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in watched.poll(0)}
            if ended:
                raise RuntimeError(f"rank {[r for r, d in self._others.items() if d in ended]} has died")
            if time.monotonic() >= deadline:
                raise RuntimeError("a piece was not copied in time: a member is silent or too slow")


OTHER_MACHINE = "weights.backend=ipc is for processes of one machine. Set weights.backend=sockets, or nccl"


def _process(pid: int, rank: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise RuntimeError(f"rank {rank} (process {pid}) cannot be watched, and may have died: {error}") from error
