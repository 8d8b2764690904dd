"""The likeliest tokens of each step, at the door of the replay: a group that the learner would end on is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import EpisodeError, WireError
from asyncrl.replay.codec.group import encode_group
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.schema import AdvantageConfig
from asyncrl.types import TOPK_IDS, TOPK_LOGPROBS, SamplingParams, Trajectory
from tests.replay.helpers import group
from tests.replay.server.test_fuzz import Door

HALF = float(np.log(0.5))


def with_topk(trajectory: Trajectory, changed: dict[str, np.ndarray]) -> Trajectory:
    """Of each token two, each of probability a half but for the last, which has one alone."""
    count = int(trajectory.loss_mask.sum())
    ids, logprobs = np.tile(np.array([1, 0], np.int32), (count, 1)), np.full((count, 2), HALF, np.float32)
    logprobs[-1] = 0.0, -np.inf
    return replace(trajectory, extras={TOPK_IDS: ids, TOPK_LOGPROBS: logprobs} | changed)


def test_they_are_accepted_and_their_absence_too() -> None:
    door = Door()
    made = group(door.order, [0, 0, 0])
    first, *others = made.trajectories
    encoded = encode_group(replace(made, trajectories=(with_topk(first, {}), *others)))
    assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"


WRONG = {
    "negative": (TOPK_IDS, lambda array: -1 - array),
    "beyond the vocabulary": (TOPK_IDS, lambda array: array + (1 << 30)),
    "int64": (TOPK_IDS, lambda array: array.astype(np.int64)),
    "short": (TOPK_IDS, lambda array: array[1:]),
    "flat": (TOPK_IDS, lambda array: array.flatten()),
    "one less": (TOPK_LOGPROBS, lambda array: array[:, 1:]),
    "NaN": (TOPK_LOGPROBS, lambda array: array * np.float32("nan")),
    "infinite": (TOPK_LOGPROBS, lambda array: -np.float32("inf") * (array - 1)),
    "above 0": (TOPK_LOGPROBS, lambda array: array + np.float32(0.7)),
    "more than all": (TOPK_LOGPROBS, lambda array: array * np.float32(0.5)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_are_none_is_refused(what: str) -> None:
    door = Door()
    made = group(door.order, [0, 0, 0])
    first, *others = made.trajectories
    name, change = WRONG[what]
    changed = with_topk(first, {name: change(with_topk(first, {}).extras[name])})
    encoded = encode_group(replace(made, trajectories=(changed, *others)))
    with pytest.raises(WireError, match=r"trajectory 0 of group .*topk_"), np.errstate(all="raise"):
        door.insert(encoded.header, encoded.frames)


def test_a_worker_that_records_them_finds_them_missing() -> None:
    parts = RewardParts.of(AdvantageConfig(), SamplingParams(temperature=1.0, max_new_tokens=4, record_topk=2))
    first, *_ = group(Door().order, [0]).trajectories
    assert parts.complete([with_topk(first, {})], None)
    with pytest.raises(EpisodeError, match=r"trajectory 0: extras has no 'topk_ids'.*engine.record_topk"):
        parts.complete([first], None)
