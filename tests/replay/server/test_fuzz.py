"""Random messages are decoded or refused, and cost other peers nothing; `fuzz.py` has the long runs."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.evaluation.orders import EvalResult
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.protocol import DroppedSample
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Session
from asyncrl.types import NO_VERSION, DropReason
from tests.replay.fuzz import TOO_DEEP, VOCABULARY, fuzz_decoders, fuzz_server, places, put
from tests.replay.helpers import Clock, group, settings, trajectory


def test_mutated_frames_are_decoded_or_refused() -> None:
    counts = fuzz_decoders(20_000, seed=1)
    assert sum(counts.values()) == 20_000
    names = ("insert", "columns", "plan")
    assert all(counts[f"{name}_{end}"] > 100 for name in names for end in ("decoded", "refused"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_thousand_mutated_frames_are_decoded_or_refused() -> None:
    assert sum(fuzz_decoders(200_000, seed=2).values()) == 200_000


@pytest.mark.timeout(300)
def test_an_honest_worker_loses_nothing_beside_a_hostile_one(caplog: pytest.LogCaptureFixture) -> None:
    seen = fuzz_server(10_000, seed=3)
    assert "worker 'hostile' is disconnected" in caplog.text
    assert seen["good_groups"] > 100
    assert seen["trained_groups"] > seen["good_groups"] - 4


class Door:
    """A desk with one order taken by worker `w`."""

    def __init__(self) -> None:
        self.core = ReplayCore(settings(), Clock())
        self.desk = Handlers(self.core)
        self.core.hello("w", "a")
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.core.announce({"vocabulary": VOCABULARY})
        self.core.served("w", "a", 0, "f")
        self.worker = Session("worker", "w", "a", b"id", 0.0)
        self.order = self.core.acquire("w", "a", 1).assignments[0]

    def insert(self, header, frames) -> Answer:
        body = [headers.encode_group_header(header), None]
        reply = self.desk.handle(self.worker, "insert", wire.unpack(wire.pack(body)), frames)
        assert isinstance(reply, Answer)
        return reply


LIES = {
    "length": lambda t: replace(t, length=t.length + 1),
    "prompt": lambda t: replace(t, prompt_length=t.prompt_length - 1),
    "fewer loss tokens": lambda t: replace(t, version_tokens=((0, 2),)),
    "more loss tokens": lambda t: replace(t, prompt_length=0, version_tokens=((0, 4),)),
    "version": lambda t: replace(t, version_tokens=((7, 3),)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_its_arrays_contradict_never_reaches_the_learner(lie) -> None:
    door = Door()
    encoded = encode_group(group(door.order, [0, 0, 0]))
    first, *others = encoded.header.trajectories
    header = replace(encoded.header, trajectories=(LIES[lie](first), *others))
    if lie == "version":  # The arrays carry no versions; the header alone can be wrong about them.
        assert door.insert(header, encoded.frames).body[0] == "rejected"
    else:
        with pytest.raises(WireError):
            door.insert(header, encoded.frames)
    assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1
    assert door.core.state.in_flight == 0


def poisoned(what: str):
    good = trajectory([0, 0, 0])
    if what == "vocabulary":
        return replace(good, token_ids=np.array([1, 2, 3, 4, VOCABULARY], np.int32))
    logprobs = good.behavior_logprobs.copy()
    logprobs[3] = {"nan": np.nan, "infinite": -np.inf, "positive": 0.1}[what]
    return replace(good, behavior_logprobs=logprobs)


@pytest.mark.parametrize("what", ["vocabulary", "nan", "infinite", "positive"])
def test_values_that_cannot_be_trained_on_are_refused_at_the_door(what, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.replay.codec.group.check_columns", lambda *columns: None)  # a sender without scruples
    door = Door()
    encoded = encode_group(replace(group(door.order, [0]), trajectories=(trajectory([0] * 3), poisoned(what))))
    monkeypatch.undo()
    with pytest.raises(WireError, match=r"token_ids|behavior_logprobs"):
        door.insert(encoded.header, encoded.frames)
    assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1


def test_another_worker_s_group_is_not_ended_by_a_malformed_insert() -> None:
    door = Door()
    encoded = encode_group(group(door.order, [0, 0, 0]))
    door.core.hello("x", "b")
    door.worker = Session("worker", "x", "b", b"id2", 0.0)
    with pytest.raises(WireError):
        door.insert(encoded.header, encoded.frames[:-1])
    assert door.core.state.in_flight == 1


def test_texts_that_the_learner_could_not_read_are_refused() -> None:
    door = Door()
    encoded = encode_group(group(door.order, [0, 0, 0]))
    bad = b"\xc1" * len(encoded.frames[0])
    with pytest.raises(WireError, match="msgpack"):
        door.insert(encoded.header, [bad, *encoded.frames[1:]])


def test_lists_in_lists_in_any_place_of_a_worker_s_request_end_in_a_typed_error() -> None:
    door = Door()
    encoded = encode_group(group(door.order, [0, 0]))
    fail = [
        messages.encode_record(door.order),
        "failed_reward",
        "why",
        [0.5],
        messages.encode_record(DroppedSample(group_id=0)),
    ]
    result = EvalResult(job_id=0, chunk=0, attempt=0, version_min=0, version_max=0, scores=(1.0,))
    bodies = {
        "insert": [headers.encode_group_header(encoded.header), fail[-1]], "acquire": [1, 0.0], "fail": fail,
        "served": [0, "f"], "report_evaluation": messages.encode_record(result), "watch": [0, 0.0],
    }  # fmt: skip
    for verb, body in bodies.items():
        for path in places(body):
            with contextlib.suppress(WireError):
                door.desk.handle(door.worker, verb, put(body, path, TOO_DEEP), encoded.frames)
                raise AssertionError(f"{verb} was taken with lists in lists at {path}")
    worker, packed = headers.encode_group_header(encoded.header)
    fields = [wire.pack(each) for each in wire.unpack(packed)]
    for place in range(len(fields)):
        nested = [*fields[:place], b"\x91" * 1003 + b"\x90", *fields[place + 1 :]]
        with pytest.raises(WireError):
            body = [[worker, bytes([packed[0]]) + b"".join(nested)], None]
            door.desk.handle(door.worker, "insert", body, encoded.frames)
