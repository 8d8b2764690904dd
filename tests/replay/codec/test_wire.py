from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.errors import OtherSchemaError, WireError
from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.evaluation.samples import MOST_SAMPLES, Sample, for_the_wire
from asyncrl.replay.client.client import decode_lease
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.columns import LARGE_ARRAY, SHARED, Columns, columns_of, decode
from asyncrl.replay.codec.group import (
    StoredGroup,
    check_stored,
    decode_texts,
    encode_group,
    group_header,
    runs_of,
    split_frames,
)
from asyncrl.replay.codec.wire import Envelope
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.protocol import Acquired, DroppedSample, Member, TrainedReply
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Session
from asyncrl.types import NO_VERSION, Assignment, ExtraHeader, StepPlan, TrajectoryGroup, TrajectoryHeader
from tests.replay.helpers import Clock, group, same_trajectory, settings, trajectory

ORDER = Assignment(group_id=3, prompt_index=4, attempt=1, seed=5, policy_version=2)


def through_the_wire(made):
    """Insert, store and cut out again, as the server does."""
    encoded = encode_group(made)
    header = headers.decode_group_header(wire.unpack(wire.pack(headers.encode_group_header(encoded.header))))
    assert header == encoded.header
    stored = split_frames(header, [bytes(frame) for frame in encoded.frames])
    return header, stored


def arrived(header, stored):
    return stored.trajectories(header.trajectories)


def test_a_group_arrives_as_it_was_sent() -> None:
    made = group(ORDER, [4, 4, 5, 7], size=3)
    header, stored = through_the_wire(made)
    assert [t.version_tokens for t in header.trajectories] == [((4, 2), (5, 1), (7, 1))] * 3
    assert all(map(same_trajectory, made.trajectories, arrived(header, stored)))
    assert decode_texts(stored.texts) == ("what?", made.completion_texts, 1.0, 2.0)


def test_branches_arrive_as_branches_and_other_rows_are_as_they_were() -> None:
    plain = group(ORDER, [4, 4], size=3)
    first, second, third = (replace(each, extras={}) for each in plain.trajectories)
    made = replace(plain, trajectories=(first, replace(second, reward=first.reward, branch=True), third))
    header, stored = through_the_wire(made)
    assert [each.branch for each in header.trajectories] == [False, True, False] and header.members == 2
    assert [each.branch for each in arrived(header, stored)] == [False, True, False]
    with_extras = replace(header.trajectories[1], extras=(ExtraHeader("image", "|u1", (2, 3)),))
    several = replace(header, trajectories=(header.trajectories[0], with_extras, header.trajectories[2]))
    assert headers.decode_group_header(headers.encode_group_header(several)) == several != header


def in_two_turns(earned: tuple[float, ...]) -> TrajectoryGroup:
    """Three trajectories, the second with two turns of which it says what they earned."""
    plain = group(ORDER, [4, 4, 4, 4, 4], size=3)
    first, second, third = (replace(each, extras={}) for each in plain.trajectories)
    mask, at = second.loss_mask.copy(), second.prompt_length + 1
    mask[at] = False
    versions = np.where(mask, second.policy_versions, NO_VERSION).astype(np.int32)
    logprobs = np.where(mask, second.behavior_logprobs, 0).astype(np.float32)
    turned = replace(
        second, loss_mask=mask, policy_versions=versions, behavior_logprobs=logprobs, turn_rewards=earned, reward=0.5
    )
    return replace(plain, trajectories=(first, turned, third))


def test_rewards_of_turns_arrive_and_other_rows_are_as_they_were() -> None:
    header, stored = through_the_wire(in_two_turns((0.25, -1.0)))
    assert [each.turn_rewards for each in header.trajectories] == [(), (0.25, -1.0), ()]
    assert [each.turn_rewards for each in arrived(header, stored)] == [(), (0.25, -1.0), ()]
    assert header.trajectories[1].earned == (0.25, 0.25) and header.trajectories[0].earned == ()
    first, second, third = header.trajectories
    both = replace(second, branch=True, reward=first.reward, extras=(ExtraHeader("image", "|u1", (2, 3)),))
    several = replace(header, trajectories=(first, both, third))
    assert headers.decode_group_header(headers.encode_group_header(several)) == several != header


@pytest.mark.parametrize("earned", [(1e308, 1e308), (-1e308, -1e308), (1.7e308, -1.7e308)])
def test_rewards_of_turns_whose_sums_are_infinite_are_refused_by_both_sides(earned: tuple[float, ...]) -> None:
    with pytest.raises(WireError, match="finite sums"):
        encode_group(in_two_turns(earned))
    header = through_the_wire(in_two_turns((0.25, -1.0)))[0]
    lying = replace(header, trajectories=(replace(header.trajectories[1], turn_rewards=earned),))
    with pytest.raises(WireError, match="finite sums"):
        headers.decode_group_header(headers.encode_group_header(lying))


@pytest.mark.parametrize("earned", [(1.0,), (1.0, 2.0, 3.0), (float("nan"), 1.0)])
def test_rewards_of_other_turns_than_the_mask_has_are_refused_by_both_sides(earned: tuple[float, ...]) -> None:
    with pytest.raises(WireError, match="turn"):
        encode_group(in_two_turns(earned))
    encoded = encode_group(in_two_turns((0.25, -1.0)))
    first, second, third = encoded.header.trajectories
    lying = replace(encoded.header, trajectories=(first, replace(second, turn_rewards=earned), third))
    with pytest.raises(WireError, match="turn"):
        header = headers.decode_group_header(headers.encode_group_header(lying))
        check_stored(header, split_frames(header, [bytes(frame) for frame in encoded.frames]), 1000)


@pytest.mark.parametrize("change", [{"reward": 2.0}, {"rewards": {"format": 0.0}}, {}])
def test_a_branch_without_its_episode_is_refused(change: dict[str, Any]) -> None:
    first, *_ = group_header(group(ORDER, [4, 4])).trajectories
    branch = replace(first, branch=True, **change)
    header = replace(group_header(group(ORDER, [4])), trajectories=(first, branch) if change else (branch, first))
    with pytest.raises(WireError, match="a branch must come after the first trajectory of its episode"):
        headers.decode_group_header(headers.encode_group_header(header))


def test_arrays_that_trajectories_share_cannot_be_written_to() -> None:
    header, stored = through_the_wire(group(ORDER, [4, 4, 4]))
    first, second = arrived(header, stored)
    assert np.shares_memory(first.policy_versions, second.policy_versions)
    for array in (first.token_ids, first.loss_mask, first.policy_versions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def with_observation() -> TrajectoryGroup:
    """One trajectory with a tool's answer in the middle: masked, without version, and not what the prompt ends with."""
    base = trajectory([1, 1, 2, 2, 2])
    mask = base.loss_mask.copy()
    mask[3] = False
    versions = np.where(mask, base.policy_versions, NO_VERSION).astype(np.int32)
    return replace(group(ORDER, [1]), trajectories=(replace(base, loss_mask=mask, policy_versions=versions),))


@pytest.mark.parametrize("versions", [[], [3] * (SHARED + 1), [3] * SHARED + [4]])
def test_a_trajectory_of_any_length_and_versions_arrives_as_it_was_sent(versions) -> None:
    made = replace(group(ORDER, [1]), trajectories=(trajectory(versions, prompt=SHARED // 2 + 1),))
    header, stored = through_the_wire(made)
    (found,) = arrived(header, stored)
    assert same_trajectory(made.trajectories[0], found)


def test_observation_tokens_keep_their_place_between_sampled_ones() -> None:
    made = with_observation()
    header, stored = through_the_wire(made)
    (found,) = arrived(header, stored)
    assert same_trajectory(made.trajectories[0], found)


def test_large_arrays_travel_in_frames_of_their_own() -> None:
    tokens = LARGE_ARRAY // 4 + 5
    made = replace(group(ORDER, [1, 1]), trajectories=(trajectory([6] * tokens), trajectory([6])))
    header, stored = through_the_wire(made)
    assert len(stored.columns.own) == 2
    assert len(stored.columns.joined) < LARGE_ARRAY
    assert all(map(same_trajectory, made.trajectories, arrived(header, stored)))


def test_neighbours_that_are_cut_out_of_a_group_arrive_as_they_were_sent() -> None:
    large = trajectory([6] * (LARGE_ARRAY // 4 + 5))
    made = replace(
        group(ORDER, [1]),
        trajectories=(trajectory([6]), large, with_observation().trajectories[0], trajectory([6, 7]), large),
    )
    header, stored = through_the_wire(made)
    for first in range(5):
        for count in range(1, 6 - first):
            pieces, own = stored.columns.part(first, count)
            facts = header.trajectories[first : first + count]
            found = decode(facts, columns_of(facts, b"".join(pieces), own))
            assert all(map(same_trajectory, made.trajectories[first : first + count], found))


@given(st.lists(st.integers(0, 3), max_size=30))
def test_runs_rebuild_the_versions(versions) -> None:
    runs = runs_of(np.array(sorted(versions), np.int32))
    assert [v for v, n in runs for _ in range(n)] == sorted(versions)
    assert len(runs) == len(set(versions))


def broken(**changes):
    return replace(trajectory([1, 1, 2]), **changes)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (broken(token_ids=np.arange(5, dtype=np.int64)), "token_ids must be int32"),
        (broken(token_ids=np.array([1, 2, 3, 4, -5], np.int32)), "negative"),
        (broken(loss_mask=np.ones(4, bool)), "loss_mask"),
        (broken(behavior_logprobs=np.array([0, 0, np.nan, -1, -1], np.float32)), "finite"),
        (broken(behavior_logprobs=np.array([0, 0, -np.inf, -1, -1], np.float32)), "finite"),
        (broken(behavior_logprobs=np.array([0, 0, 0.5, -1, -1], np.float32)), "not above 0"),
        (broken(policy_versions=np.full(5, NO_VERSION, np.int32)), "needs the policy_version"),
        (broken(reward=float("nan")), "reward"),
        (broken(rewards={"x": float("inf")}), "rewards"),
        (broken(token_ids=np.zeros(0, np.int32)), "tokens"),
    ],
)
def test_a_trajectory_that_would_poison_the_loss_is_not_even_sent(bad, complaint) -> None:
    with pytest.raises(WireError, match=complaint):
        encode_group(replace(group(ORDER, [1]), trajectories=(bad,)))


def test_a_group_needs_trajectories_and_ids() -> None:
    with pytest.raises(WireError, match="trajectories"):
        group_header(replace(group(ORDER, [1]), trajectories=()))
    with pytest.raises(WireError, match="group_id"):
        group_header(replace(group(ORDER, [1]), group_id=-1))


def test_arrays_that_disagree_with_the_judged_header_are_refused() -> None:
    header, stored = through_the_wire(group(ORDER, [1, 1, 2]))
    facts, *others = header.trajectories
    for lie in (
        replace(facts, length=facts.length + 1),
        replace(facts, prompt_length=1),
        replace(facts, version_tokens=((1, 2),)),
        replace(facts, version_tokens=((1, 2), (2, 2))),
    ):
        with pytest.raises(WireError):
            columns_of([lie, *others], stored.columns.joined, ())


@given(st.data())
@hypothesis_settings(max_examples=400, deadline=None)
def test_a_mutated_trajectory_is_decoded_or_refused_but_nothing_else(data) -> None:
    header, stored = through_the_wire(data.draw(st.sampled_from((group(ORDER, [1, 1, 2], size=1), with_observation()))))
    raw = bytearray(stored.columns.joined)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(raw)))
    for blob in (bytes(raw), bytes(raw[:kept])):
        try:
            changed = split_frames(replace(header, nbytes=len(stored.texts) + len(blob)), [stored.texts, blob])
            check_stored(header, changed, 100)
        except WireError:
            continue
        (found,) = arrived(header, changed)
        assert np.isfinite(found.behavior_logprobs[found.loss_mask]).all()
        assert int(found.loss_mask.sum()) == header.trajectories[0].loss_tokens
        assert 0 <= found.token_ids.min() <= found.token_ids.max() < 100


@given(st.binary(max_size=200))
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x81\x90\x01")
@example(b"\xa2\xff\xfe")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\x91" * 150 + b"\x00")
@example(b"\x81\xc4\x01a\x01")
def test_any_bytes_are_a_header_or_a_wire_error(data) -> None:
    for reader in (
        wire.decode_envelope,
        decode_texts,
        lambda raw: headers.decode_group_header(wire.unpack(raw)),
        lambda raw: headers.decode_plan(wire.unpack(raw)),
        lambda raw: messages.decode_record(Acquired, wire.unpack(raw)),
        lambda raw: messages.decode_record(TrainedReply, wire.unpack(raw)),
    ):
        try:
            reader(data)
        except WireError:
            continue


def test_nesting_that_would_overflow_the_stack_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        wire.unpack(b"\x91" * 100_000 + b"\x00")
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(WireError):
        wire.pack(nested)


def test_what_is_no_plain_value_is_not_sent() -> None:
    for value in (object(), {1, 2}, 1 << 70):
        with pytest.raises(WireError, match="plain values"):
            wire.pack(value)


def test_half_a_character_ends_nobody_who_quotes_it() -> None:
    assert wire.unpack(wire.pack(["fail", "it said \ud83d", {"\udfff": 1.0}])) == ["fail", "it said ?", {"?": 1.0}]


def test_extensions_and_oversize_headers_are_refused() -> None:
    with pytest.raises(WireError, match="extension"):
        wire.unpack(msgpack.packb(msgpack.ExtType(5, b"x")))
    with pytest.raises(WireError, match="exceeds the limit"):
        wire.unpack(b"\xc4" + bytes(100), max_bytes=50)


def test_another_schema_version_is_refused_by_name() -> None:
    envelope = Envelope(run="r", verb="v", request=1, incarnation="i", body=None)
    frame = wire.encode_envelope(envelope)
    assert wire.decode_envelope(frame) == envelope
    with pytest.raises(OtherSchemaError, match="wire schema 1"):
        wire.decode_envelope(wire.pack([1, "r", "v", 1, "i", None]))
    for bad in ([2, "r"], [2, "r", "v", -1, "i", None], [2, 5, "v", 1, "i", None], [2, "r" * 300, "v", 1, "i", None]):
        with pytest.raises(WireError):
            wire.decode_envelope(wire.pack(bad))


FIELDS = [
    3, 4, 1, 10, [5, 6], [2, 3], [0.5, 1], ["stop", "length"], [1, 2], [1, 1, 2], [3, 1, 2],
    [{"style": 0.25}, {}], [[1, [["f", "<f4", [2, 3]]], 0, [0.5]]],
]  # fmt: skip
"""Packed header of two trajectories, the second with two versions, an extra and a turn."""
HEADER = ["w", wire.pack(FIELDS)]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0,), -1), ((0,), 1.5), ((0,), True), ((2,), None), ((3,), -1), ((4,), []), ((4,), "x"), ((4,), [5]),
        ((4, 0), 0), ((4, 1), 5.0), ((4, 1), True), ((4,), [5] * 4097), ((5, 0), 6), ((5, 0), -1), ((5,), [2, 3, 4]),
        ((6, 0), float("nan")), ((6,), [1e308, float("inf")]), ((6, 0), "1"), ((6, 1), True), ((6,), [0.5]),
        ((7, 0), "x" * 300), ((7, 0), b"stop"), ((7,), ["stop"]), ((8,), [1, 1]), ((8,), [3, -1]), ((8,), [2, 2]),
        ((8,), None), ((9,), [1, 1, -1]), ((9,), [1, 1, 1 << 31]), ((9,), [1, 1]), ((10,), [3, 1, 0]), ((10, 0), 4),
        ((10, 2), 3), ((10, 2), 2.0), ((11,), None), ((11, 0), {"style": "good"}), ((11, 0), {1: 0.5}), ((11,), [{}]),
        ((12,), None), ((12, 0), [1]), ((12, 0), [1, [], 0, []]), ((12,), [FIELDS[12][0]] * 2), ((12, 0, 0), 2),
        ((12, 0, 0), -1), ((12, 0, 2), 2), ((12, 0, 2), 1), ((12, 0, 3), [0.5] * 4), ((12, 0, 3), ["1"]),
        ((12, 0, 1), [["f", "<f4"]]), ((12, 0, 1), [["f", "<f4", [1]]] * 2),
        ((12, 0, 1), [[f"f{n}", "|u1", []] for n in range(65)]), ((12, 0, 1, 0, 0), ""), ((12, 0, 1, 0, 0), "f" * 65),
        ((12, 0, 1, 0, 0), b"f"), ((12, 0, 1, 0, 1), ">f4"), ((12, 0, 1, 0, 1), "|O"), ((12, 0, 1, 0, 1), 4),
        ((12, 0, 1, 0, 2), 6), ((12, 0, 1, 0, 2), [1] * 9), ((12, 0, 1, 0, 2), [-1]), ((12, 0, 1, 0, 2), [True]),
        ((12, 0, 1, 0, 2), [1 << 30, 1 << 30]),
    ],
)  # fmt: skip
def test_a_group_header_with_an_impossible_field_is_refused(place, value) -> None:
    good = headers.decode_group_header(HEADER)
    assert [facts.version_tokens for facts in good.trajectories] == [((1, 3),), ((1, 1), (2, 2))]
    assert headers.encode_group_header(replace(good)) == ["w", wire.pack([*FIELDS[:6], [0.5, 1.0], *FIELDS[7:]])]
    made = wire.unpack(wire.pack(FIELDS))
    target = made
    for index in place[:-1]:
        target = target[index]
    target[place[-1]] = value
    with pytest.raises(WireError):
        headers.decode_group_header(["w", wire.pack(made)])


@pytest.mark.parametrize("made", [[7, HEADER[1]], ["w", FIELDS], ["w"], ["w", b""], ["w", HEADER[1] + b"\0"], None])
def test_a_group_header_that_is_no_name_with_a_packed_one_is_refused(made) -> None:
    with pytest.raises(WireError):
        headers.decode_group_header(made)


def test_a_server_fills_in_whose_a_group_is_and_a_changed_header_is_packed_anew() -> None:
    header = headers.decode_group_header(HEADER, "another")
    assert header.worker == "another" and headers.packed_header(header) is HEADER[1]
    later = replace(header, attempt=2)
    assert headers.decode_group_header(headers.encode_group_header(later)) == later != header


def test_frames_that_do_not_match_their_header_are_refused() -> None:
    encoded = encode_group(group(ORDER, [1, 1, 2]))
    frames = encoded.frames
    for bad in (frames[:1], [*frames, b""], [frames[0], frames[1][:-8]], [frames[0], bytes(frames[1]) + bytes(8)]):
        for nbytes in (encoded.header.nbytes, sum(map(len, bad))):
            with pytest.raises(WireError):
                split_frames(replace(encoded.header, nbytes=nbytes), bad)


def test_a_plan_arrives_as_it_was_sent_and_no_trajectory_is_in_two_shards() -> None:
    two = (headers.decode_group_header(HEADER), headers.decode_group_header(HEADER))
    plan = StepPlan(
        step=3, policy_version=7, groups=two, staleness={1: 2}, max_staleness=2, shards=(((0, 0),), ((1, 0),))
    )
    assert headers.decode_plan(wire.unpack(wire.pack(headers.encode_plan(plan)))) == plan
    for shards in ((((0, 0),), ((0, 0),)), (((2, 0),),), (((0, 2),),)):
        with pytest.raises(WireError):
            headers.decode_plan(headers.encode_plan(replace(plan, shards=shards)))


def test_small_replies_arrive_as_they_were_sent() -> None:
    acquired = Acquired(
        assignments=(ORDER,),
        evaluations=(EvalAssignment(job_id=1, chunk=0, attempt=0, eval_set="h", start=0, stop=4),),
        waiting_for="x",
    )
    assert messages.decode_record(Acquired, wire.unpack(wire.pack(messages.encode_record(acquired)))) == acquired
    summary = EvalSummary(
        **{"job_id": 1, "step": 2, "policy_version": 2, "eval_set": "h", "mean": 0.5, "count": 4},
        **{"low": 0.25, "high": 1.0, "figures": {"pass@2": 0.5}},
        **{"failed": 0, "version_min": 2, "version_max": 3, "superseded": 1},
        samples=(Sample(row=3, sample=0, reward=0.5, rewards={"f": 1.0}), Sample(row=4, sample=0, failed="none")),
    )
    dropped = DroppedSample(group_id=5, prompt="p", completion="é", rewards={"f": 1.0}, dropped="stale")
    reply = TrainedReply(metrics={"a": 1.0}, evaluations=(summary,), dropped=(dropped, DroppedSample(group_id=6)))
    assert messages.decode_record(TrainedReply, wire.unpack(wire.pack(messages.encode_record(reply)))) == reply
    member = Member(worker="w", incarnation="i", policy_version=NO_VERSION)
    assert messages.decode_records(Member, [messages.encode_record(member)]) == (member,)
    with pytest.raises(WireError, match="true or false"):
        messages.decode_record(Acquired, [[], [], 1, ""])
    with pytest.raises(WireError):
        messages.decode_records(Member, [["w", "i"]])


def test_samples_of_an_evaluation_are_bounded_whatever_their_texts_and_say_what_was_cut() -> None:
    long = {"prompt": "a\ud83d" * 10**5, "completion": "é" * 9000 + "#### 4", "finish_reason": "f" * 999}
    parts = {f"part {n}": float(n) for n in range(999)} | {"x" * 999: 1.0}
    sample = for_the_wire(Sample(row=0, sample=0, reward=0.0, rewards={"bad": float("nan"), **parts}, **long))
    assert sample.completion.startswith("é") and sample.completion.endswith("#### 4")
    assert "814 characters left out" in sample.completion and "191808 characters left out" in sample.prompt
    assert list(sample.rewards) == [f"part {n}" for n in range(64)]
    many = {"job_id": 0, "chunk": 0, "attempt": 0, "version_min": 0, "version_max": 0, "scores": (0.0,) * 999}
    result = EvalResult(**many, samples=(sample,) * MOST_SAMPLES)  # pyright: ignore
    sent = wire.pack(messages.encode_record(result))
    assert len(sent) < wire.MAX_REQUEST_BYTES / 2
    assert messages.decode_record(EvalResult, wire.unpack(sent)) == result
    with pytest.raises(WireError, match="samples must be a list of at most 64"):
        messages.decode_record(EvalResult, messages.encode_record(replace(result, samples=(sample,) * 65)))


def leased_step(world: int, tokens: int):
    """Two groups through a real desk, leased by every rank."""
    core = ReplayCore(settings(groups_per_step=2, group_size=2), Clock())
    desk = Handlers(core)
    core.hello("w", "a")
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
    core.publish(policy_version=0, parent=NO_VERSION)
    core.served("w", "a", 0, "f")
    worker = Session("worker", "w", "a", b"id", 0.0)
    learner = Session("learner", "rank", "l", b"id2", 0.0)
    sent = {}
    for order in core.acquire("w", "a", 2).assignments:
        made = group(order, [0] * tokens)
        encoded = encode_group(made)
        body = [headers.encode_group_header(encoded.header), None]
        reply = desk.handle(worker, "insert", body, encoded.frames)
        assert isinstance(reply, Answer) and reply.body[0] == "accepted"
        sent[order.group_id] = made
    leases = []
    for rank in range(world):
        reply = desk.handle(learner, "lease", [0, rank, world, 0.0, 1 if rank == 0 else 0], ())
        assert isinstance(reply, Answer)
        body = wire.unpack(wire.pack(reply.body))
        leases.append(decode_lease(Response(body, [bytes(frame) for frame in reply.frames]), rank))
    return sent, leases


@pytest.mark.parametrize("tokens", [3, 9000, LARGE_ARRAY // 4 + 1])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_together_get_every_trajectory_once_and_intact(world, tokens) -> None:
    sent, leases = leased_step(world, tokens)
    places = [place for lease in leases for place in lease.trajectories]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for lease in leases:
        for (position, t), arrived in lease.trajectories.items():
            assert same_trajectory(sent[lease.plan.groups[position].group_id].trajectories[t], arrived)
    (sample,) = leases[0].samples
    assert sample.completion_texts == sent[sample.group_id].completion_texts
    assert len(sample.trajectories) == 2
    assert not any(lease.samples for lease in leases[1:])


def test_a_stored_group_is_frames_that_were_not_copied() -> None:
    encoded = encode_group(group(ORDER, [1, 2]))
    frames = [bytes(frame) for frame in encoded.frames]
    stored = split_frames(encoded.header, frames)
    assert isinstance(stored, StoredGroup) and isinstance(stored.columns, Columns)
    assert stored.columns.joined is frames[1]
    token_ids = arrived(encoded.header, stored)[0].token_ids
    assert np.shares_memory(token_ids, np.frombuffer(frames[1], np.uint8))


def test_a_trajectory_header_counts_its_loss_tokens() -> None:
    header = TrajectoryHeader(length=9, prompt_length=2, reward=0.0, version_tokens=((1, 3), (2, 2)))
    assert header.loss_tokens == 5
