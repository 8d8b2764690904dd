"""Handles of memory, and the wire made of them; `tests.weights.chaos` kills processes during an update."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.weights import ipc
from asyncrl.weights.broadcast import subscriber as subscribers
from asyncrl.weights.broadcast.group import WeightGroup, connect_store, host_store
from asyncrl.weights.broadcast.local_wire import LocalWire
from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.ipc import Opened, export, shared_bytes
from tests.weights.board import Board, WorkerRendezvous

HOST, TIMEOUT_S = "127.0.0.1", 60.0


def own_files() -> int:
    """Files of shared memory that this process holds."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except FileNotFoundError:  # of the listing itself
            continue
    return sum("memfd:asyncrl-" in link for link in links)


def test_a_handle_is_the_memory_itself_and_nothing_of_it_stays():
    gc.collect()
    before = own_files()
    mine, opened = shared_bytes(4096), Opened()
    theirs = opened.tensor(export(mine[16:48], {}))
    mine[20] = 7
    assert theirs[4] == 7 and len(theirs) == 32
    whole = opened.tensor(export(mine, {}))
    assert whole.data_ptr() + 16 == theirs.data_ptr()  # opened once
    assert own_files() == before + 3  # Python's mmap keeps a copy of what it maps
    del mine
    gc.collect()
    assert own_files() == before + 1 and theirs[4] == 7  # a map outlives its owner: no read of it ends a process
    del theirs, whole, opened
    gc.collect()
    assert own_files() == before
    assert len(shared_bytes(0)) == 0


def test_what_cannot_be_reached_is_said():
    with pytest.raises(RuntimeError, match="cannot reach"):
        export(torch.zeros(8, dtype=torch.uint8), {})
    mine = shared_bytes(64)
    start, length, (kind, pid, file, name, nbytes) = msgpack.unpackb(export(mine, {}))
    gone = subprocess.Popen(["true"])
    gone.wait(60)
    for forged in (
        [start, length, [kind, gone.pid, file, name, nbytes]],
        [start, length, [kind, pid, file, "asyncrl-another", nbytes]],
        [start, length, [kind, pid, file, name, nbytes * 2]],
        [start, length * 2, [kind, pid, file, name, nbytes]],
        [start, length, [kind, pid]],
    ):
        packed = msgpack.packb(forged)
        assert packed is not None
        with pytest.raises(RuntimeError, match="cannot be opened"):
            Opened().tensor(packed)


def test_buckets_of_one_size_in_one_allocation_of_a_gpu_are_two(monkeypatch):
    places = {0: torch.zeros(8, dtype=torch.uint8), 4096: torch.ones(8, dtype=torch.uint8)}
    monkeypatch.setattr(ipc, "_cuda", lambda uuid, handle, nbytes, offset, *counter: places[offset])
    opened = Opened()
    for offset, there in places.items():
        packed = msgpack.packb([0, 8, ["cuda", "GPU-1", b"allocation", 8, offset, b"counter", 0, b"event", False]])
        assert packed is not None
        assert torch.equal(opened.tensor(packed), there)


def formed(world: int, timeout_s: float = TIMEOUT_S) -> list[WeightGroup]:
    store, port = host_store(HOST, timeout_s)

    def join(rank: int) -> WeightGroup:
        own = store if rank == 0 else connect_store(HOST, port, timeout_s)
        return WeightGroup(own, Link(backend="ipc", host=HOST, timeout_s=timeout_s), epoch=1, rank=rank, world=world)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(join, range(world)))


def through(group: WeightGroup, buffer: torch.Tensor) -> None:
    for piece in group.pieces(buffer):
        group.wait(group.broadcast(piece))


def test_every_member_copies_every_piece(monkeypatch):
    monkeypatch.setattr(LocalWire, "piece_bytes", 1000)
    made: list[int] = []
    monkeypatch.setattr(ipc, "_handle", lambda storage, real=ipc._handle: (made.append(1), real(storage))[1])
    groups = formed(3)
    source = shared_bytes(4096)
    targets = [torch.zeros(4096, dtype=torch.uint8) for _ in groups[1:]]
    with ThreadPoolExecutor(3) as threads:
        for version in range(3):
            source.copy_(torch.randint(0, 256, (4096,), dtype=torch.uint8))
            works = [threads.submit(through, group, b) for group, b in zip(groups, [source, *targets], strict=True)]
            for work in works:
                work.result(TIMEOUT_S)
            assert all(torch.equal(target, source) for target in targets), version
    assert len(made) == 1, "of one storage one handle, whatever is sent of it: torch counts those of a GPU"
    for group in groups:
        group.abort()
        group.abort()


def test_without_all_of_them_nobody_is_in():
    store, port = host_store(HOST, TIMEOUT_S)

    def join(rank: int) -> str:
        own = store if rank == 0 else connect_store(HOST, port, TIMEOUT_S)
        try:
            WeightGroup(
                own, Link(backend="ipc", host=HOST, timeout_s=1.0 if rank == 0 else 60.0), epoch=1, rank=rank, world=3
            )
        except RuntimeError as error:
            return str(error)
        return "is in"

    with ThreadPoolExecutor(2) as threads:
        conductor, member = threads.map(join, range(2))  # rank 2 died on its way
    assert "is in" not in (conductor, member)


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_leaves_ends_it_for_the_others_at_once(leaver: int):
    groups = formed(3)
    waits = [group for rank, group in enumerate(groups) if rank not in (leaver, 0 if leaver else 1)]
    stuck = groups[0] if leaver else waits[0]
    buffer = shared_bytes(64) if stuck is groups[0] else torch.zeros(64, dtype=torch.uint8)
    said: list[str] = []

    def stand() -> None:
        try:
            through(stuck, buffer)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=stand)
    thread.start()
    groups[leaver].abort()
    thread.join(TIMEOUT_S / 2)  # half of what a silent one would take
    assert said and "left" in said[0]
    for group in groups:
        group.abort()


def test_a_worker_on_another_machine_is_refused_in_a_sentence(monkeypatch):
    board = Board()
    sender = BroadcastSender(board, Link(host=HOST, timeout_s=TIMEOUT_S, backend="ipc"))
    monkeypatch.setattr(subscribers, "machine", lambda: "another")
    subscriber = BroadcastSubscriber(
        WorkerRendezvous(board, "w"), lambda *_: None, worker="w", incarnation="1", timeout_s=TIMEOUT_S
    )
    subscriber._thread.join(TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"not on the learner's machine.*weights\.backend=sockets"):
        subscriber.check()
    subscriber.close()
    sender.close()
