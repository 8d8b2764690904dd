"""Checks of the support of tokens by the replay: a group on which the learner would fail is never accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.recorded import SUPPORT
from asyncrl.replay.codec.group import encode_group
from asyncrl.types import SUPPORT_BITS, SUPPORT_COUNTS, SUPPORT_IDS
from tests.replay.helpers import group
from tests.replay.server.test_fuzz import Door


def sent(door: Door, changed: dict[str, np.ndarray]):
    """A group of one trajectory, each of whose tokens was drawn from itself and token 0; the last from all."""
    made = group(door.order, [0, 0, 0])
    first = made.trajectories[0]
    own = first.token_ids[first.loss_mask]
    counts = np.full(len(own), 2, np.int32)
    counts[-1] = 0
    extras = {
        SUPPORT_COUNTS: counts,
        SUPPORT_IDS: np.stack([np.zeros_like(own), own], 1)[:-1].flatten().astype(np.int32),
        SUPPORT_BITS: np.zeros((0, 1), np.uint8),
    } | changed
    trajectories = (replace(first, extras=extras), *made.trajectories[1:])
    return encode_group(replace(made, trajectories=trajectories))


def test_one_that_holds_its_token_is_accepted_and_its_absence_too() -> None:
    door = Door()
    encoded = sent(door, {})
    assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (SUPPORT_COUNTS, np.array([2], np.int32)),
        (SUPPORT_COUNTS, np.array([2, 2, -5], np.int32)),
        (SUPPORT_IDS, np.zeros(4, np.int32)),
        (SUPPORT_IDS, np.full(4, 1 << 30, np.int32)),
        (SUPPORT_IDS, np.full(4, -1, np.int32)),
        (SUPPORT_IDS, np.zeros(4, np.int64)),
        (SUPPORT_BITS, np.zeros((1, 1), np.uint8)),
    ],
    ids=["short", "no bits", "elsewhere", "beyond the vocabulary", "negative", "int64", "bits of nobody"],
)
def test_what_is_no_support_is_refused(name: str, array: np.ndarray) -> None:
    assert name in SUPPORT
    door = Door()
    encoded = sent(door, {name: array})
    with pytest.raises(WireError, match=r"trajectory 0 of group .*support_"):
        door.insert(encoded.header, encoded.frames)
