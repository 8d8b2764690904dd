"""A server that answers nonsense: a typed error for exactly those whom it concerns, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import AsyncRLError, ReplayError, WireError
from asyncrl.replay.client import connection
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import reply as words
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.together import decode_requests
from asyncrl.replay.server.router import router
from tests.replay.helpers import replay_config

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 60
WELCOME = ["run", "boot", 1000]
STORED = ["stored", "", 1000]
CLOCKS = ["boot", 1, 2]
VERY_DEEP: Any = msgpack.unpackb(b"\x91" * 900 + b"\x90")
"""A list in a list in a list...: legal, and too deep for Python to show."""

PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
BODIES = VALUES | st.builds(lambda last: ["stored", "", last], VALUES) | st.just(VERY_DEEP)
VERBS = st.sampled_from(["ok", "ok", "fenced", "wire", "no_progress", "replay", "unknown_peer", "other", ""])

Frames = list[bytes]
Answer = Callable[[int, str], Frames | None]
"""What the server says to request number, verb; None: what an honest one would."""


def reply(verb: str, number: int, body: Any) -> Frames:
    return [wire.pack([wire.SCHEMA, "run", verb, number, "boot", body])]


class Handlers:
    """A client, and in the place of its server a socket that this test answers at."""

    def __init__(self, socket: zmq.Socket, client: Connection) -> None:
        self._socket, self.client = socket, client
        self._unsound: set[int] = set()
        """Requests that were not answered soundly: as an honest server, the next beat says that they are lost."""

    def answer_until(self, done: Callable[[], bool], answer: Answer) -> None:
        """waits for: the client, 60 s."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "somebody waits for ever"
            if self._socket.poll(20):
                peer, header, *frames = self._socket.recv_multipart()
                heard = wire.decode_envelope(header)
                both = [] if heard.verb == "hello" else decode_requests(heard, frames)[1]
                for number, verb in [(each.number, each.verb) for each in both] or [(heard.request, heard.verb)]:
                    said = answer(number, verb)
                    self._unsound -= {number}
                    if said is not None and verb not in ("hello", "heartbeat"):
                        self._unsound.add(number)
                    self._socket.send_multipart([peer, *(said or self._sound(number, verb))])

    def _sound(self, number: int, verb: str) -> Frames:
        bodies = {"hello": WELCOME, "heartbeat": [sorted(self._unsound), 1000, 1, CLOCKS], "insert": STORED}
        return reply("ok", number, bodies.get(verb, verb))


@contextmanager
def desk() -> Iterator[Handlers]:
    config = replay_config(heartbeat_s=0.02, heartbeat_timeout_s=600.0, wait_timeout_s=600.0)
    with router(config) as socket:
        client = Connection(config.address, role="worker", name="w", run_digest="d", config=config)
        try:
            yield Handlers(socket, client)
        finally:
            client._welcome = False  # No goodbye: nobody is there to answer it.
            client.close()


def outcome(future: Future[Response]) -> Any:
    """The reply's body, or the error."""
    error = future.exception(timeout=PATIENCE_S)
    return future.result().body if error is None else error


def first(verb: str, says: Callable[[int], Frames], since: int = 0) -> Answer:
    """`says` to the first request of this verb, and what an honest server would to all else.

    Args:
        since: number of the first request meant: one that was asked before, and answered, may still come a second time.
    """
    told: list[int] = []

    def answer(number: int, asked: str) -> Frames | None:
        if asked != verb or number < since or told:
            return None
        told.append(number)
        return says(number)

    return answer


def next_group(line: Handlers, says: Callable[[int], Frames]) -> Answer:
    """`says` to the next group that is sent."""
    return first("insert", says, since=line.client._next)


def met(line: Handlers, answer: Answer) -> tuple[Any, Any]:
    """What became of a group and of a question beside it."""
    group = line.client.request("insert", None, (), 10)
    question = line.client.request("members")
    line.answer_until(lambda: group.done() and question.done(), answer)
    return outcome(group), outcome(question)


@pytest.fixture(scope="module")
def line() -> Iterator[Handlers]:
    with desk() as line:
        yield line


@pytest.mark.parametrize("body", [None, [], 7, "stored", ["", "", "x"], ["", "", -1], ["", "", True], VERY_DEEP])
def test_a_group_whose_reply_has_no_window_fails_alone(line, body) -> None:
    group, question = met(line, next_group(line, lambda number: reply("ok", number, body)))
    assert isinstance(group, WireError) and "insert" in str(group)
    assert question == "members"
    assert met(line, lambda number, verb: None) == (STORED, "members"), "the connection goes on, its credit is whole"


@pytest.mark.parametrize("verb", ["fenced", "wire", "replay", "no_progress", "never heard of"])
@pytest.mark.parametrize("body", [None, ["x"], VERY_DEEP, "why" * 100_000], ids=["none", "list", "deep", "long"])
def test_an_error_fails_its_request_alone_whatever_its_words_are(line, verb, body) -> None:
    group, question = met(line, next_group(line, lambda number: reply(verb, number, body)))
    assert type(group) is words.ERRORS.get(verb, ReplayError) and len(str(group)) < 2 * wire.MAX_TEXT
    assert question == "members"


@settings(max_examples=60, deadline=None)
@given(verb=VERBS, body=BODIES, extra=st.lists(st.binary(max_size=9), max_size=3))
def test_whatever_is_answered_to_one_request_the_others_get_their_answers(line, verb, body, extra) -> None:
    group, question = met(line, next_group(line, lambda number: reply(verb, number, body) + extra))
    assert isinstance(group, AsyncRLError) or (verb in ("ok", "unknown_peer") and type(group) is list)
    assert question == "members"


@settings(max_examples=30, deadline=None)
@given(asked=st.sampled_from(["hello", "heartbeat", "insert"]), verb=VERBS | st.just("refused"), body=BODIES)
def test_nonsense_in_any_place_leaves_nobody_waiting(asked, verb, body) -> None:
    with desk() as line:
        results = met(line, first(asked, lambda number: reply(verb, number, body)))
    # A list is an answer to the group: it ends with a window. Not compared: a NaN in it is no other's equal.
    assert all(isinstance(result, (AsyncRLError, list)) or result == "members" for result in results)


@settings(max_examples=30, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), min_size=1, max_size=4), data=st.data())
def test_a_damaged_header_leaves_nobody_waiting(places, data) -> None:
    def damaged(number: int) -> Frames:
        (header,) = reply("ok", number, STORED)
        for place, byte in places:
            place %= len(header)
            header = header[:place] + bytes([byte]) + header[place + 1 :]
        return [header[: data.draw(st.integers(0, len(header)))]]

    with desk() as line:
        for result in met(line, first("insert", damaged)):
            assert isinstance(result, (AsyncRLError, list, str))


def test_a_server_that_asks_for_a_hello_again_and_again_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(connection, "TURNED_AWAY", 20)
    with desk() as line:
        question = line.client.request("members")
        stranger = lambda number, verb: None if verb == "hello" else reply("unknown_peer", number, "")  # noqa: E731
        line.answer_until(question.done, stranger)
        assert isinstance(outcome(question), ReplayError)
