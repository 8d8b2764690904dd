"""Who is waited for, and for how long: with a clock that the test moves, and loads that end when the test says so."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.errors import WeightsError
from asyncrl.weights.broadcast import protocol
from asyncrl.weights.broadcast.protocol import post, wait_answer
from asyncrl.weights.subscriber import SubscriberThread
from tests.weights.board import Board, WorkerRendezvous


class Clock:
    """In place of `time`: sleeping moves it, and what is due happens."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when, what in [entry for entry in self.due if entry[0] <= self.now]:
            self.due.remove((when, what))
            what()


def answer(
    monkeypatch: pytest.MonkeyPatch, *, beats: Sequence[float] = (), ack: float = math.inf, alive: bool = True
) -> tuple[Clock, Callable[[], tuple[str, Any]]]:
    """A clock, and the publisher's wait for w7, which beats and answers at these times."""
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(protocol, "time", clock)
    clock.due = [*((at, lambda: store.add("beat", 1)) for at in beats), (ack, lambda: post(store, "ack", ("ok", {})))]
    return clock, lambda: wait_answer(store, "ack", "beat", who="w7", timeout_s=4.0, alive=lambda: alive)


def test_a_slow_load_is_no_silence(monkeypatch):
    clock, wait = answer(monkeypatch, beats=[3.0, 6.0, 9.0, 12.0], ack=15.0)
    assert wait() == ("ok", {})
    assert clock.now >= 15.0


def test_who_stops_to_beat_is_waited_for_one_timeout_longer(monkeypatch):
    clock, wait = answer(monkeypatch, beats=[3.0], ack=30.0)
    with pytest.raises(WeightsError, match=r"waited 4\.0 s for w7 to acknowledge"):
        wait()
    assert 7.0 <= clock.now < 9.0


def test_the_dead_are_not_waited_for(monkeypatch):
    clock, wait = answer(monkeypatch, alive=False)
    with pytest.raises(WeightsError, match="w7 died before it could acknowledge"):
        wait()
    assert clock.now < 4.0


class Loading(SubscriberThread):
    """Serves one version, with an engine that takes until it is told to."""

    def __init__(self, board: Board) -> None:
        self.go, self.beats = threading.Event(), 0
        super().__init__(WorkerRendezvous(board, "a"), lambda version, tensors: self._hold(), "test")
        self._thread.start()

    def _hold(self) -> None:
        assert self.go.wait(60)

    def _beat(self) -> None:
        self.beats += 1

    def _run(self) -> None:
        self._serve(3, "f", {}, self._beat)


def test_a_worker_beats_while_its_engine_loads_and_is_told_to_serve_only_then():
    board = Board()
    subscriber = Loading(board)
    deadline = time.monotonic() + 30
    while subscriber.beats < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert board.served() == [] and subscriber.policy_version != 3
    subscriber.go.set()
    while not board.served():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    subscriber.close()
    assert subscriber.policy_version == 3
