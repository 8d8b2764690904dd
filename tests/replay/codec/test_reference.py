"""Log-probs of a reference that come with the trajectories: a group that the learner would end on is never accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.replay.codec.group import encode_group
from asyncrl.types import REF_LOGPROBS, DropReason, Trajectory
from tests.replay.helpers import group
from tests.replay.server.test_fuzz import Door

GOOD = np.array([np.nan, 5.0, -1.0, -2.0, 0.0], np.float32)
"""Of two prompt tokens, whose values are of no matter, and three sampled ones."""


def with_reference(trajectory: Trajectory, given: np.ndarray | None) -> Trajectory:
    return replace(trajectory, extras={} if given is None else {REF_LOGPROBS: given})


def sent(door: Door, *given: np.ndarray | None):
    made = group(door.order, [0, 0, 0])
    pairs = zip(made.trajectories, given, strict=True)
    return encode_group(replace(made, trajectories=tuple(with_reference(*pair) for pair in pairs)))


@pytest.mark.parametrize(
    "bad",
    [
        np.array([0.0, 0.0, -1.0, np.nan, -1.0], np.float32),
        np.array([0.0, 0.0, -1.0, -np.inf, -1.0], np.float32),
        np.array([0.0, 0.0, -1.0, 0.1, -1.0], np.float32),
        GOOD[1:],
        GOOD.astype(np.float64),
    ],
    ids=["nan", "infinite", "positive", "short", "float64"],
)
def test_values_that_are_no_log_probs_are_refused_at_the_door(bad: np.ndarray) -> None:
    door = Door()
    encoded = sent(door, GOOD, bad)
    with pytest.raises(WireError, match=r"trajectory 1 of group .*ref_logprobs"):
        door.insert(encoded.header, encoded.frames)
    assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1


def test_good_ones_and_other_extras_are_accepted_and_their_absence_where_nobody_needs_them() -> None:
    for given in ((GOOD, GOOD), (GOOD, None), (None, None)):
        door = Door()
        encoded = sent(door, *given)
        assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"


def test_a_group_without_them_is_refused_once_the_learner_says_that_it_needs_them() -> None:
    for second, needed in ((None, "rollout"), (GOOD, "rollout"), (None, "")):
        door = Door()
        door.core.announce({"reference": needed})
        encoded = sent(door, GOOD, second)
        if needed and second is None:
            with pytest.raises(WireError, match=r"1 trajectories of group .*reference.path=rollout"):
                door.insert(encoded.header, encoded.frames)
            assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1
        else:
            assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"
