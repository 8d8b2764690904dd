"""What is shown of groups that were never trained: few, short, with the reason, whoever dropped them."""

from __future__ import annotations

import dataclasses

from asyncrl.evaluation.samples import MOST_PARTS
from asyncrl.replay.codec import messages, wire
from asyncrl.replay.codec.dropped import MOST_CHARACTERS, shortened
from asyncrl.replay.codec.group import StoredGroup, encode_group, group_header, split_frames
from asyncrl.replay.core.ledger import Entry
from asyncrl.replay.protocol import MOST_DROPPED, DroppedSample
from asyncrl.replay.server.dropped import Dropped
from asyncrl.rollout.dropped import EVERY_S, DroppedSamples
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
