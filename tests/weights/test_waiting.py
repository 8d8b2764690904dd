"""Which peer is waited for and how long, with a clock and loads that the test controls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.errors import WeightsError
from asyncrl.weights.broadcast import protocol, publisher, subscriber
from asyncrl.weights.broadcast.protocol import answer, beat, collect, introduce, post, pushed
from asyncrl.weights.subscriber import Subscriber
from tests.waiting import until
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


PEERS = [("w7", "1"), ("w8", "1")]


def asked(
    monkeypatch: pytest.MonkeyPatch,
    *,
    beats: Sequence[float] = (),
    acks: Sequence[float] = (math.inf, math.inf),
    live: Sequence[tuple[str, str]] = PEERS,
    dies: float = math.inf,
) -> tuple[Clock, partial[list[tuple[str, Any]]]]:
    """A clock, and the publisher's wait for two peers on event 5 of epoch 3; the first one beats at these times."""
    clock, store, known = Clock(), dist.HashStore(), list(live)
    monkeypatch.setattr(protocol, "time", clock)
    for peer in PEERS:
        introduce(store, peer)
        answer(store, peer, 3, 4, "bad", "the event before")
    clock.due = [(at, lambda: beat(store, PEERS[0])) for at in beats]
    clock.due += [(at, partial(answer, store, peer, 3, 5, "ok", peer[0])) for peer, at in zip(PEERS, acks, strict=True)]
    clock.due.append((dies, lambda: known.remove(PEERS[1])))
    wait = partial(collect, store, PEERS, epoch=3, event=5, timeout_s=4.0, live=lambda: known, meanwhile=lambda: None)
    return clock, wait


def test_a_slow_load_is_no_silence(monkeypatch):
    clock, wait = asked(monkeypatch, beats=[3.0, 6.0, 9.0, 12.0], acks=[15.0, 0.0])
    assert wait() == [("ok", "w7"), ("ok", "w8")]
    assert 15.0 <= clock.now < 15.1


def test_who_stops_to_beat_is_waited_for_one_timeout_longer(monkeypatch):
    clock, wait = asked(monkeypatch, beats=[3.0], acks=[30.0, 0.0])
    with pytest.raises(WeightsError, match=r"waited 4\.0 s for w7 to acknowledge"):
        wait()
    assert 7.0 <= clock.now < 9.0


def test_the_dead_are_not_waited_for_whoever_else_is_still_loading(monkeypatch):
    clock, wait = asked(monkeypatch, beats=[float(at) for at in range(1, 40)], acks=[30.0, math.inf], dies=2.0)
    with pytest.raises(WeightsError, match="w8 died before it could acknowledge"):
        wait()
    assert 2.0 <= clock.now < 3.0


def test_an_answer_counts_though_its_sender_died_before_it_could_count_it(monkeypatch):
    clock, wait = asked(monkeypatch, acks=[0.0, math.inf], live=PEERS[:1])
    post(wait.args[0], "ack/w8/1", [3, 5, "ok", "w8"])
    assert wait() == [("ok", "w7"), ("ok", "w8")]
    assert clock.now < 1.0


def test_what_a_subscriber_waits_for_is_pushed_and_a_store_that_is_gone_is_said_at_once():
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60), wait_for_workers=False)
    stop = threading.Event()
    threading.Timer(0.05, post, (server, "3/event/1", {"kind": "tick"})).start()
    assert pushed(client, "3/event/1", 60.0, stop) == {"kind": "tick"}
    assert pushed(client, "3/event/2", 0.05, stop) is None
    for _ in range(20):  # what is left of a wait may be less than torch counts in: that is no store that is gone
        assert pushed(client, "3/event/2", 0.0009, stop) is None
    stop.set()
    assert pushed(client, "3/event/2", 60.0, stop) is None
    del server
    with pytest.raises(dist.DistError):
        pushed(client, "3/event/2", 60.0, threading.Event())


def test_who_stood_still_for_longer_than_events_are_kept_joins_anew(monkeypatch):
    monkeypatch.setattr(publisher, "_KEPT_EVENTS", 3)
    monkeypatch.setattr(subscriber, "_SILENCE_S", 0.05)  # of waits for what is not there
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    sender: Any = SimpleNamespace(_store=store, _epoch=7, _event=0)
    looks = []

    def look(wait_s: float) -> bool:
        looks.append(wait_s)
        return len(looks) > 10  # else it would look for ever

    member: Any = SimpleNamespace(
        _closed=threading.Event(), _look=look, _stats={"epoch": 0.0, "epochs": 0.0},
        _receiver=SimpleNamespace(changed=lambda: False),
    )  # fmt: skip
    for _ in range(3):
        publisher.BroadcastSender._post_event(sender, {"kind": "tick"})
    seat: Any = SimpleNamespace(epoch=7)
    assert not subscriber.BroadcastSubscriber._follow(member, store, seat), "it has all events, and waits for the next"
    assert len(looks) == 11
    publisher.BroadcastSender._post_event(sender, {"kind": "tick"})
    assert subscriber.BroadcastSubscriber._follow(member, store, seat)


@pytest.mark.parametrize("ends", [False, True])
def test_a_worker_that_ends_blames_nobody_for_what_it_waits_for_no_more(ends, monkeypatch, caplog):
    closed, store = threading.Event(), dist.HashStore()
    receiver = SimpleNamespace(join=lambda seat: None, leave=lambda: None, receive=lambda event: [])
    member: Any = SimpleNamespace(
        _board={"host": "127.0.0.1", "port": 1, "backend": "sockets"}, _closed=closed, _receiver=receiver,
        _timeout_s=0.05, _interface="", _stats={},
    )  # fmt: skip
    received = partial(subscriber.BroadcastSubscriber._receive, member)
    member._follow = lambda store, seat: received(store, seat, 1, {"policy_version": 3})
    if ends:
        closed.set()
    invite = {"epoch": 7, "rank": 1, "world": 2, "manifest": {}}
    assert subscriber.BroadcastSubscriber._join(member, store, invite)
    assert ("waited 0.05 s for the fingerprints of version 3" in caplog.text) is not ends


class Loading(Subscriber):
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
    until(lambda: subscriber.beats >= 3)
    assert board.served() == [] and subscriber.policy_version != 3
    subscriber.go.set()
    until(board.served)
    subscriber.close()
    assert subscriber.policy_version == 3
