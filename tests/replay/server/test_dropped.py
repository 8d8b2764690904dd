"""Samples of dropped groups: few, short, and with the reason, whoever dropped them."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.errors import GenerationError, RewardError, WireError
from asyncrl.evaluation.samples import MOST_PARTS
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.group import StoredGroup, encode_group, group_header, split_frames
from asyncrl.replay.codec.messages import MOST_CHARACTERS, shortened
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.protocol import MOST_DROPPED, DroppedSample
from asyncrl.replay.server.dropped import Dropped
from asyncrl.replay.server.sessions import Answer
from asyncrl.rollout.groups.dropped import EVERY_S, DroppedSamples
from asyncrl.telemetry.metrics.log import fate_of
from asyncrl.types import DropReason, Prompt
from tests.replay.helpers import Clock, group
from tests.replay.server.test_fuzz import Door


def test_a_worker_shows_the_first_member_of_one_group_a_second_of_each_reason() -> None:
    clock, door = Clock(), Door()
    made = group(door.order, [0, 3])
    samples = DroppedSamples(clock)
    prompt = Prompt(index=0, epoch=0, row=0, token_ids=made.trajectories[0].token_ids[:2], text="p")
    shown = samples.of(door.order, prompt, "filtered", "mine: no", made)
    assert shown is not None
    assert (shown.completion, shown.reward) == (made.completion_texts[0], made.trajectories[0].reward)
    assert (shown.prompt, shown.dropped, shown.detail, shown.version_max) == ("p", "filtered", "mine: no", 3)
    assert samples.of(door.order, prompt, "filtered", "mine: no", made) is None
    other = samples.of(door.order, prompt, "failed_reward", "it raised")
    assert other is not None and other.line().keys() == {"group_id", "prompt", "dropped", "detail"}
    clock.now += EVERY_S
    assert samples.of(door.order, prompt, "filtered", "mine: no", made) is not None


def test_the_server_keeps_few_of_them_and_cut() -> None:
    kept = Dropped(Door().core.run)
    hostile = DroppedSample(
        group_id=99,
        prompt="x" * 60_000,
        rewards={**{f"r{n}": 1.0 for n in range(1000)}, "y" * 1000: 1.0},
        dropped="stale",
    )
    for _ in range(MOST_DROPPED + 5):
        kept.told(hostile)
    taken = kept.taken()
    assert len(taken) == MOST_DROPPED and kept.taken() == ()
    assert len(taken[0].prompt) < 2 * MOST_CHARACTERS and "characters left out" in taken[0].prompt
    assert len(taken[0].rewards) == MOST_PARTS
    assert shortened(dataclasses.replace(hostile, reward=float("nan"))).reward is None


def test_a_group_dropped_for_its_age_is_shown_with_its_texts() -> None:
    door = Door()
    made, kept = group(door.order, [0, 3]), Dropped(door.core.run)
    encoded = encode_group(made)
    stored = split_frames(encoded.header, encoded.frames)
    assert isinstance(stored, StoredGroup)
    entry = Entry(group_id=made.group_id, prompt_index=0, header=encoded.header, payload=stored)
    door.core.run.on_stale(entry, DropReason.STALE)
    door.core.run.on_stale(dataclasses.replace(entry, payload=object()), DropReason.STALE)  # it lies elsewhere
    (shown,) = kept.taken()
    first = group_header(made).trajectories[0]
    assert (shown.prompt, shown.completion) == (made.prompt_text, made.completion_texts[0])
    assert (shown.reward, shown.dropped, shown.group_id) == (first.reward, "stale", made.group_id)
    assert (shown.version_min, shown.version_max) == (0, 3)


def test_a_group_that_is_tried_again_is_not_shown_as_dropped() -> None:
    door, order = Door(), None
    sample = messages.encode_record(DroppedSample(group_id=99, worker="another", dropped="stale", prompt="p"))
    for _ in range(door.core.run.settings.max_attempts):
        assert door.desk.dropped.taken() == ()
        order = door.order if order is None else door.core.acquire("w", "a", 1).assignments[0]
        assert order.group_id == door.order.group_id
        body = [messages.encode_record(order), "failed_reward", "why", [], sample]
        for _ in range(2):  # a repeated report says nothing new
            door.desk.handle(door.worker, "fail", wire.unpack(wire.pack(body)), ())
    (shown,) = door.desk.dropped.taken()
    assert (shown.prompt, shown.group_id, shown.worker) == ("p", door.order.group_id, "w")
    assert shown.dropped == "failed_reward", "as the server knows it, whatever the sample says"


def test_a_member_that_a_group_was_closed_without_is_shown_once_with_its_reason() -> None:
    door = Door()
    encoded = encode_group(dataclasses.replace(group(door.order, [0, 0]), lost=RewardError("it raised")))
    lost = DroppedSample(group_id=99, worker="another", dropped="failed_reward", prompt="p", detail="1 of 3: it raised")

    def insert(dropped: str) -> Answer:
        sample = messages.encode_record(dataclasses.replace(lost, dropped=dropped))
        body = wire.unpack(wire.pack([headers.encode_group_header(encoded.header), sample]))
        reply = door.desk.handle(door.worker, "insert", body, encoded.frames)
        assert isinstance(reply, Answer)
        return reply

    assert [insert("failed_reward").body[0] for _ in range(2)] == ["accepted", "duplicate"]
    (shown,) = door.desk.dropped.taken()
    assert shown == dataclasses.replace(lost, group_id=door.order.group_id, worker="w", dropped="member_failed_reward")
    assert fate_of(shown.line()) == "member_failed_reward: 1 of 3: it raised"


def test_a_group_whose_lost_member_has_no_known_reason_is_refused_and_no_longer_under_way() -> None:
    door = Door()
    encoded = encode_group(group(door.order, [0, 0]))
    sample = messages.encode_record(DroppedSample(group_id=0, dropped="whatever"))
    body = wire.unpack(wire.pack([headers.encode_group_header(encoded.header), sample]))
    with pytest.raises(WireError, match="not a drop reason"):
        door.desk.handle(door.worker, "insert", body, encoded.frames)
    assert door.desk.dropped.taken() == ()
    assert door.order.group_id not in door.core.state.held, "it would be under way for as long as its maker lives"


def test_a_worker_shows_one_lost_member_a_second_of_each_reason_beside_groups_of_that_reason() -> None:
    clock, door = Clock(), Door()
    whole = group(door.order, [0, 0])
    made = dataclasses.replace(whole, lost=GenerationError("out of memory"))
    samples = DroppedSamples(clock)
    prompt = Prompt(index=0, epoch=0, row=0, token_ids=made.trajectories[0].token_ids[:2], text="p")
    size = len(made.trajectories) + 1
    assert samples.of(door.order, prompt, "failed_generation", "all failed") is not None
    shown = samples.of_member(door.order, prompt, made, size)
    assert shown is not None and (shown.dropped, shown.prompt) == ("failed_generation", "p")
    assert shown.detail == f"1 of {size} members are missing, the others are kept; the last failure: out of memory"
    assert samples.of_member(door.order, prompt, made, size) is None
    clock.now += EVERY_S
    assert samples.of_member(door.order, prompt, whole, size - 1) is None, "it has all members"
    assert samples.of_member(door.order, prompt, made, size) is not None
