"""Replies that wait for the journal leave once it is durable; those to one peer leave together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import zmq

from asyncrl.errors import WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.reply import decode_replies
from asyncrl.replay.codec.wire import SEVERAL, Envelope
from asyncrl.replay.net.socket_options import send
from asyncrl.replay.server.outbox import TOGETHER, Outbox
from asyncrl.replay.server.sessions import Session


@dataclass
class FakeJournal:
    promised: int = 0
    durable: int = 0


def reply(number: int) -> bytes:
    return wire.encode_envelope(Envelope(run="r", verb="ok", request=number, incarnation="b", body=[number]))


class Way:
    def __init__(self, router: zmq.Socket) -> None:
        self._router = router

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        send(self._router, [identity, *frames])


@dataclass
class Office:
    """An outbox with two peers that are connected."""

    journal: FakeJournal
    outbox: Outbox
    peers: dict[str, zmq.Socket]
    sessions: dict[str, Session]
    way: Way

    def promise(self, peer: str, request: int, *payload: bytes) -> None:
        self.journal.promised += 1
        self.outbox.promise(self.sessions[peer], request, [reply(request), *payload])

    def arrived(self, peer: str) -> list[list[bytes]]:
        messages = []
        while self.peers[peer].poll(100 if messages else 20_000):
            messages.append(self.peers[peer].recv_multipart())
        return messages


@pytest.fixture
def office() -> Iterator[Office]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind("inproc://office")
    peers, sessions = {}, {}
    for name in ("a", "b"):
        peers[name] = context.socket(zmq.DEALER)
        peers[name].setsockopt(zmq.IDENTITY, name.encode())
        peers[name].connect("inproc://office")
        peers[name].send(b"here")
        router.recv_multipart()
        sessions[name] = Session("worker", name, name, name.encode(), 0.0)
    journal = FakeJournal()
    way = Way(router)
    yield Office(journal, Outbox(way, journal, time.monotonic), peers, sessions, way)
    context.destroy(linger=0)


def test_replies_of_one_sync_reach_each_peer_in_one_message(office: Office) -> None:
    for request in range(3):
        office.promise("a", request)
        office.promise("b", 10 + request)
    office.outbox.release()
    assert office.peers["a"].poll(0) == 0, "nothing is durable yet"
    office.journal.durable = 5
    office.outbox.release()
    (message,) = office.arrived("a")
    assert message == [SEVERAL, reply(0), reply(1), reply(2)]
    assert [envelope.request for envelope, _ in decode_replies(message)] == [0, 1, 2]
    assert [envelope.request for envelope, _ in decode_replies(*office.arrived("b"))] == [10, 11]
    assert office.sessions["b"].waiting == {12}


def test_a_reply_alone_or_with_payload_goes_as_it_is(office: Office) -> None:
    office.promise("a", 1, b"payload", b"")
    office.promise("b", 2)
    office.promise("a", 3)
    office.journal.durable = office.journal.promised
    office.outbox.release()
    found = [pair for message in office.arrived("a") for pair in decode_replies(message)]
    assert {envelope.request: list(payload) for envelope, payload in found} == {1: [b"payload", b""], 3: []}
    assert office.arrived("b") == [[reply(2)]]


def test_more_replies_than_a_message_takes_go_in_several(office: Office) -> None:
    for request in range(TOGETHER + 1):
        office.promise("a", request)
    office.journal.durable = office.journal.promised
    office.outbox.release()
    first, second = office.arrived("a")
    assert len(first) == 1 + TOGETHER and second == [reply(TOGETHER)]


@pytest.mark.parametrize("frames", [[b""], [b"", b""], [b"", reply(1), b"\xc1"], [b"\xc1", b"x"]])
def test_a_message_that_is_no_reply_is_refused_whole(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_replies(frames)


def test_without_a_journal_the_replies_of_one_turn_leave_together_and_count_as_waiting_until_then(
    office: Office,
) -> None:
    outbox = Outbox(office.way, None, time.monotonic)
    for request in range(3):
        outbox.promise(office.sessions["a"], request, [reply(request)])
    assert office.sessions["a"].waiting == {0, 1, 2}, "a heartbeat in the same turn would have them sent again"
    outbox.release()
    assert not office.sessions["a"].waiting
    (message,) = office.arrived("a")
    assert [envelope.body for envelope, _ in decode_replies(message)] == [[0], [1], [2]]
