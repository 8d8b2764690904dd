"""The wire of sockets: members in threads; `tests.weights.chaos` kills processes during an update."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

from asyncrl.weights.broadcast import stream_wire
from asyncrl.weights.broadcast.forming import ApartError, Forming
from asyncrl.weights.broadcast.protocol import fetch, post, wait_key
from asyncrl.weights.broadcast.stream_wire import StreamWire

HOST, WAIT_S, SHORT_S = "127.0.0.1", 60.0, 0.3
MUCH = 64 << 20
"""Bytes that no socket holds."""


@contextmanager
def chain(world: int, listen: str = HOST) -> Iterator[list[StreamWire]]:
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as threads:
        found = [
            threads.submit(StreamWire, store, rank, world, WAIT_S, listen, forming=Forming(store))
            for rank in range(world)
        ]
    wires = [each.result() for each in found]
    try:
        yield wires
    finally:
        for wire in wires:
            wire.abort()


def through(wire: StreamWire, buffer: torch.Tensor, wait_s: float = WAIT_S) -> torch.Tensor:
    for piece in buffer.split(wire.piece_bytes):
        wire.wait(wire.broadcast(piece, wait_s), wait_s)
    return buffer


def at_once(calls: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor | BaseException | None]:
    with ThreadPoolExecutor(len(calls)) as threads:
        works = [threads.submit(call) for call in calls]
    return [work.exception() or work.result() for work in works]


def numbers(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("listen", [HOST, "::1"])
def test_every_member_of_a_chain_gets_the_bytes(monkeypatch: pytest.MonkeyPatch, near: bool, listen: str):
    if not near:  # as from another network namespace
        monkeypatch.setattr(stream_wire, "_connect_near", lambda name: None)
    sent = numbers((9 << 20) + 17)
    with chain(4, listen) as wires:
        families = {end.family for wire in wires for end in (wire._before, *wire._next) if end is not None}
        assert (socket.AF_UNIX in families) == near and len(families) == 1
        for _ in range(2):
            got = at_once([lambda wire=wire: through(wire, torch.zeros_like(sent)) for wire in wires[1:]]
                          + [lambda: through(wires[0], sent)])  # fmt: skip
            assert all(isinstance(each, torch.Tensor) and torch.equal(each, sent) for each in got)


def test_a_process_with_a_thousand_open_files_joins():
    """As rank 0 of hundreds of engines, whose store has a connection to each."""
    needed, (soft, hard) = 1200, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * needed, hard), hard))
    with ExitStack() as opened:
        for _ in range(needed):
            opened.enter_context(open(os.devnull))
        with chain(3) as wires:
            sent, got = numbers(1000), torch.zeros(1000, dtype=torch.uint8)
            outcomes = at_once(
                [lambda: through(wires[0], sent), *[partial(through, wire, got.clone()) for wire in wires[1:]]]
            )
            assert all(isinstance(outcome, torch.Tensor) and torch.equal(outcome, sent) for outcome in outcomes)


def test_a_member_that_leaves_ends_the_transfer_for_all_at_once():
    with chain(4) as wires:
        started = time.monotonic()

        def leave() -> torch.Tensor:
            through(wires[2], torch.zeros(1 << 20, dtype=torch.uint8))
            wires[2].abort()
            return torch.zeros(0)

        def other(wire: StreamWire) -> torch.Tensor:
            try:
                return through(wire, torch.zeros(MUCH, dtype=torch.uint8))
            finally:
                wire.abort()  # as its member does

        errors = at_once([leave, *(lambda wire=wires[rank]: other(wire) for rank in (0, 1, 3))])
        assert all(isinstance(each, RuntimeError) for each in errors[1:]), errors
        assert time.monotonic() - started < WAIT_S / 2


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_member_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch, silent: int, near: bool):
    if not near:
        monkeypatch.setattr(stream_wire, "_connect_near", lambda name: None)
    with chain(3) as wires:
        waiting = [wire for rank, wire in enumerate(wires) if rank != silent]
        started = time.monotonic()
        errors = at_once([lambda wire=wire: through(wire, torch.zeros(MUCH, dtype=torch.uint8), SHORT_S)
                          for wire in waiting])  # fmt: skip
        assert all("a member is silent or too slow" in str(each) for each in errors), errors
        assert SHORT_S <= time.monotonic() - started < WAIT_S / 2


def test_leaving_wakes_a_thread_that_waits_without_limit_for_bytes():
    with chain(2) as (_, wire), ThreadPoolExecutor(1) as threads:
        work = threads.submit(through, wire, torch.zeros(10, dtype=torch.uint8), 3600.0)
        time.sleep(0.05)
        wire.abort()
        assert isinstance(work.exception(WAIT_S), RuntimeError)


def test_a_group_forms_for_nobody_if_one_member_does_not_come():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        errors = [
            threads.submit(StreamWire, store, rank, 4, SHORT_S, HOST, forming=Forming(store)) for rank in range(3)
        ]
        for rank, error in enumerate(errors):
            assert f"rank {rank} of 4 did not find its neighbours" in str(error.exception(WAIT_S))


def joined(world: int, wait_s: float = WAIT_S) -> list[StreamWire | BaseException]:
    """Let all members of a chain join; the seat of each is ten times its rank."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world) as threads:
        works = [
            threads.submit(StreamWire, store, rank, world, wait_s, HOST, forming=Forming(store), seat=10 * rank)
            for rank in range(world)
        ]
        return [work.exception(WAIT_S) or work.result() for work in works]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_member_that_cannot_connect_ends_the_wait_of_all_with_its_place_and_reason(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    connect = StreamWire._connect

    def nowhere(wire: StreamWire, rank: int) -> socket.socket:
        if wire._rank == lost:
            raise OSError(f"{HOST}:{rank} (Connection refused)")
        return connect(wire, rank)

    monkeypatch.setattr(StreamWire, "_connect", nowhere)
    started = time.monotonic()
    errors = joined(4)
    assert time.monotonic() - started < WAIT_S / 2
    first = errors[0]
    assert isinstance(first, ApartError) and first.seat == 10 * lost, errors
    tried = f"{HOST}:{lost - 1} (Connection refused)"
    for part in (
        tried,
        "weights.interface",
        "weights=files with weights.url",
        *([f"nor to the learner, at {HOST}:0"] if lost > 1 else []),
    ):
        assert part in str(first)
    assert isinstance(errors[lost], ApartError)  # those behind it may have joined


@pytest.mark.parametrize("apart", [{2}, {4}, {2, 4}, {2, 3, 4, 5}])
def test_members_that_cannot_connect_to_the_one_before_them_get_the_bytes_from_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, apart: set[int]
) -> None:
    connect = StreamWire._connect

    def only_to_the_first(wire: StreamWire, rank: int) -> socket.socket:
        if wire._rank in apart and rank > 0:
            raise OSError(f"{HOST}:{rank} (timed out)")
        return connect(wire, rank)

    monkeypatch.setattr(StreamWire, "_connect", only_to_the_first)
    world = 6
    wires = [each for each in joined(world) if isinstance(each, StreamWire)]
    try:
        assert len(wires) == world
        assert len(wires[0]._next) == 1 + len(apart)
        assert f"{len(apart)} of {world - 1} subscribers have no connection to another one" in caplog.text
        sent = numbers((9 << 20) + 17)
        got = at_once([lambda wire=wire: through(wire, torch.zeros_like(sent)) for wire in wires[1:]]
                      + [lambda: through(wires[0], sent)])  # fmt: skip
        assert all(isinstance(each, torch.Tensor) and torch.equal(each, sent) for each in got)
    finally:
        for wire in wires:
            wire.abort()


def test_a_host_that_did_not_answer_is_not_tried_again_for_a_while_but_the_first_members_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def no_answer(where: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(where[0])
        raise TimeoutError("timed out")

    monkeypatch.setattr(stream_wire, "_connect_near", lambda name: None)
    avoided: dict[str, float] = {}
    for expected in (["10.0.0.1", "10.0.0.0"], ["10.0.0.0"]):
        store = dist.HashStore()
        for rank in range(2):
            post(store, f"entrance/{rank}", [f"10.0.0.{rank}", 1, "", "", "0" * 32])
        tried.clear()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "create_connection", no_answer)
            with pytest.raises(ApartError):
                StreamWire(store, 2, 3, WAIT_S, HOST, forming=Forming(store), seat=1, avoided=avoided)
        assert tried == expected
    assert set(avoided) == {"10.0.0.1"}


def test_members_that_wait_for_others_to_join_end_when_the_first_one_leaves():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(StreamWire, store, rank, 4, WAIT_S, HOST, forming=Forming(store)) for rank in (1, 2)]
        first = threads.submit(StreamWire, store, 0, 4, SHORT_S, HOST, forming=Forming(store))
        assert first.exception(WAIT_S) is not None
        started = time.monotonic()
        assert all(isinstance(each.exception(WAIT_S), RuntimeError) for each in waiting)
        assert time.monotonic() - started < WAIT_S / 2


def test_all_hear_that_one_died_and_not_that_the_first_has_left_because_of_it(monkeypatch: pytest.MonkeyPatch):
    abort = StreamWire.abort
    monkeypatch.setattr(StreamWire, "abort", lambda wire: (abort(wire), time.sleep(0.5)))
    store, died = dist.HashStore(), "w2 died before it had joined"
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(StreamWire, store, rank, 4, WAIT_S, HOST, forming=Forming(store)) for rank in (1, 2)]
        assert all(wait_key(store, f"entrance/{rank}", WAIT_S) for rank in (1, 2))
        first = threads.submit(StreamWire, store, 0, 4, WAIT_S, HOST, forming=Forming(store, lambda: died))
        assert all(died in str(each.exception(WAIT_S)) for each in (first, *waiting))


def test_a_stranger_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_wire, "_STRANGER_S", SHORT_S)
    monkeypatch.setattr(stream_wire, "_connect_near", lambda name: None)  # it comes by the same way, after them
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(StreamWire, store, 0, 2, WAIT_S, HOST, forming=Forming(store))
        assert wait_key(store, "entrance/0", WAIT_S)
        host, port, *_ = fetch(store, "entrance/0")
        mute, guessing = (socket.create_connection((host, port)) for _ in range(2))
        guessing.sendall(b"0" * 32)
        second = threads.submit(StreamWire, store, 1, 2, WAIT_S, HOST, forming=Forming(store))
        sender, receiver = first.result(WAIT_S), second.result(WAIT_S)
    for stranger in (mute, guessing):
        with suppress(ConnectionResetError):  # closed with bytes that nobody read
            assert stranger.recv(1) == b""
        stranger.close()
    for wire in (sender, receiver):
        wire.abort()


def test_bytes_that_drip_do_not_move_the_deadline():
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(SHORT_S / 10):
            theirs.send(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    started = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="a member is silent or too slow"):
            stream_wire._receive(ours, memoryview(bytearray(1 << 20)), started + 2 * SHORT_S)
    finally:
        stop.set()
        dripping.join()
        ours.close()
        theirs.close()
    assert time.monotonic() - started < WAIT_S / 2
