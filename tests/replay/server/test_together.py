"""Several requests in one message: each has the same effect as alone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.replay.client.requests import Request
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.codec.reply import decode_replies
from asyncrl.replay.codec.together import MOST, SEVERAL, Asked, decode_requests, encode_requests
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.protocol import Acquired
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.loop import ReplayServer
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import NO_VERSION, Assignment
from tests.replay.helpers import Clock, group, settings

BODIES = st.none() | st.integers(0, 9) | st.lists(st.text(max_size=4), max_size=3)
REQUESTS = st.lists(
    st.builds(
        Asked,
        number=st.integers(0, wire.MAX_ID),
        verb=st.sampled_from(["insert", "acquire", "fail"]),
        body=BODIES,
        frames=st.lists(st.binary(max_size=5), max_size=4),
    ),
    min_size=1,
    max_size=6,
)


def sent(asked: Sequence[Asked], acknowledged: int = 0, life: str = "w") -> tuple[Envelope, list[Frame]]:
    verb, number, body, frames = encode_requests(asked, acknowledged)
    made = Envelope(run="run", verb=verb, request=number, incarnation=life, body=body)
    return wire.decode_envelope(wire.encode_envelope(made)), frames


@given(REQUESTS, st.integers(0, wire.MAX_ID))
def test_what_shares_a_message_arrives_as_it_was(asked: list[Asked], acknowledged: int) -> None:
    envelope, frames = sent(asked, acknowledged)
    assert decode_requests(envelope, frames) == (acknowledged, asked)
    assert (envelope.verb == SEVERAL) == (len(asked) > 1)


@pytest.mark.parametrize(
    "rows",
    [
        [], [[1, "insert", None]], [[1, "insert", None, 3]], [[1, "insert", None, 1]], [[1, "insert", None, -1]],
        [[-1, "insert", None, 2]], [[1, 5, None, 2]], [[1, "insert", None, 2]] * 2, "rows", None,
        [[number, "acquire", None, 0] for number in range(MOST + 1)],
    ],
)  # fmt: skip
def test_rows_that_do_not_agree_with_the_frames_are_refused(rows: object) -> None:
    envelope = Envelope(run="run", verb=SEVERAL, request=1, incarnation="w", body=[0, rows])
    with pytest.raises(WireError):
        decode_requests(envelope, [b"a", b"b"])


@dataclass
class Post:
    """The way in and out of a server without a socket."""

    sockets: tuple[()] = ()

    def __post_init__(self) -> None:
        self.out: list[Envelope] = []

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        self.out += [envelope for envelope, _ in decode_replies(frames)]


class Room:
    """A server with one worker that has said hello."""

    def __init__(self) -> None:
        self.core, self.post = ReplayCore(settings(), Clock()), Post()
        self.server = ReplayServer(
            self.core, Handlers(self.core), self.post, ReplayConfig(),  # pyright: ignore[reportArgumentType]
            run_id="run", boot="b", run_digest="d",
        )  # fmt: skip
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.life = ""
        self.hello("w")

    def hello(self, life: str) -> None:
        self.life = life
        body = ["worker", "worker", "d", 0, ""]
        self.take(Envelope(run="", verb="hello", request=1, incarnation=life, body=body), [])

    def take(self, envelope: Envelope, frames: Sequence[Frame]) -> dict[int, Envelope]:
        """What was answered in this turn, by the request's number."""
        self.post.out.clear()
        self.server._take(self.life.encode(), zmq.Frame(), "worker", [wire.encode_envelope(envelope), *frames])
        self.server.waiting.settle()
        self.server.outbox.release()
        return {envelope.request: envelope for envelope in self.post.out}

    def ask(self, *asked: Asked, acknowledged: int = 0) -> dict[int, Envelope]:
        return self.take(*sent(asked, acknowledged, self.life))

    def orders(self, number: int, slots: int = 4) -> tuple[Assignment, ...]:
        reply = self.ask(Asked(number, "acquire", [slots, 0.0], ()))[number]
        return messages.decode_record(Acquired, reply.body).assignments


def insert(number: int, order: Assignment) -> Asked:
    encoded = encode_group(group(order, [0, 0]))
    return Asked(number, "insert", [headers.encode_group_header(encoded.header), None], encoded.frames)


def test_inserts_of_one_message_are_each_stored_and_answered() -> None:
    room = Room()
    one, two, *_ = room.orders(2)
    said = room.ask(insert(3, one), Asked(4, "acquire", [0, 0.0], ()), insert(5, two))
    assert [(number, envelope.verb) for number, envelope in sorted(said.items())] == [(3, "ok"), (4, "ok"), (5, "ok")]
    assert said[3].body[0] == said[5].body[0] == "accepted"
    assert set(room.core.state.buffer.waiting) == {one.group_id, two.group_id}


def test_a_message_that_comes_again_whole_or_in_parts_stores_nothing_twice() -> None:
    room = Room()
    one, two, *_ = room.orders(2)
    first = room.ask(insert(3, one), insert(4, two))
    applied = room.core.state.applied
    assert room.ask(insert(3, one), insert(4, two)) == first
    assert room.ask(insert(4, two)) == {4: first[4]}
    assert room.ask(insert(3, one), insert(4, two), acknowledged=4) == {4: first[4]}, "of 3 it has the answer"
    assert room.core.state.applied == applied and room.core.state.ledger.admitted == 4


def test_one_that_is_malformed_is_refused_alone() -> None:
    room = Room()
    one, two, *_ = room.orders(2)
    bad = insert(3, one)
    said = room.ask(Asked(3, "insert", bad.body, bad.frames[:1]), Asked(6, "nonsense", None, ()), insert(4, two))
    assert {number: envelope.verb for number, envelope in said.items()} == {3: "wire", 6: "wire", 4: "ok"}
    assert room.server.malformed == 2 and set(room.core.state.buffer.waiting) == {two.group_id}
    assert one.group_id not in room.core.state.held, "it would be under way for ever"


def test_who_leaves_in_a_message_is_heard_no_further() -> None:
    room = Room()
    one, two, *_ = room.orders(2)
    said = room.ask(insert(3, one), Asked(4, "goodbye", None, ()), insert(5, two))
    assert sorted(said) == [3, 4] and set(room.core.state.buffer.waiting) == {one.group_id}


def test_the_groups_of_a_worker_that_sends_no_message_go_to_others() -> None:
    room = Room()
    one, *_ = room.orders(2)
    room.server._take(b"w", zmq.Frame(), "worker", [b"\xc1garbage"])
    assert not room.server.sessions
    room.hello("again")
    assert one.group_id in {order.group_id for order in room.orders(2)}


def test_the_clients_requests_are_what_is_packed() -> None:
    asked = [Request(number, "insert", [number], (b"f",), 1, Future(), 0.0) for number in (7, 8)]
    verb, number, body, frames = encode_requests(asked, 7)
    assert (verb, number, body) == (SEVERAL, 7, [7, [[7, "insert", [7], 1], [8, "insert", [8], 1]]])
    assert frames == [b"f", b"f"]
