"""The experts of each token, at the door of the replay: a group that the learner would end on is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import EpisodeError, WireError
from asyncrl.recorded import ROUTERS, announced_routers, routed_tokens, routing_fault, row_of_routers
from asyncrl.replay.codec.group import encode_group
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.schema import AdvantageConfig
from asyncrl.types import ROUTED_EXPERTS, DropReason, Routers, SamplingParams, Trajectory
from tests.replay.helpers import group
from tests.replay.server.test_fuzz import Door

MODEL = Routers(layers=3, chosen=2, experts=5)


def door_of_a_mixture() -> Door:
    door = Door()
    door.core.announce({ROUTERS: [3, 2, 5]})
    return door


def routed(trajectory: Trajectory, model: Routers = MODEL) -> Trajectory:
    table = np.random.default_rng(0).random((routed_tokens(trajectory), model.layers, model.experts)).argsort(-1)
    return replace(trajectory, extras={ROUTED_EXPERTS: table[..., : model.chosen].astype(model.dtype)})


def test_they_are_accepted_and_where_nobody_needs_them_anything_is() -> None:
    door = door_of_a_mixture()
    made = group(door.order, [0, 0, 0])
    encoded = encode_group(replace(made, trajectories=tuple(map(routed, made.trajectories))))
    assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"
    door = Door()
    made = group(door.order, [0, 0, 0])
    own = tuple(replace(each, extras={ROUTED_EXPERTS: np.zeros(7)}) for each in made.trajectories)
    encoded = encode_group(replace(made, trajectories=own))
    assert door.insert(encoded.header, encoded.frames).body[0] == "accepted"


WRONG = {
    "absent": lambda array: None,
    "beyond the experts": lambda array: array + np.uint8(5),
    "twice": lambda array: array * np.uint8(0),
    "int64": lambda array: array.astype(np.int64),
    "negative": lambda array: array.astype(np.int16) - 9,
    "a token less": lambda array: array[1:],
    "a layer less": lambda array: array[:, 1:],
    "one expert": lambda array: array[..., :1],
    "flat": lambda array: array.flatten(),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_router_can_have_chosen_is_refused_and_its_group_made_again(what: str) -> None:
    door = door_of_a_mixture()
    made = group(door.order, [0, 0, 0])
    first, *others = map(routed, made.trajectories)
    changed = WRONG[what](first.extras[ROUTED_EXPERTS])
    first = replace(first, extras={} if changed is None else {ROUTED_EXPERTS: changed})
    encoded = encode_group(replace(made, trajectories=(first, *others)))
    with pytest.raises(WireError, match=r"trajectory 0 of group .*routed_experts"):
        door.insert(encoded.header, encoded.frames)
    assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1
    assert door.core.state.in_flight == 0


def test_a_group_without_any_extra_is_refused_too() -> None:
    door = door_of_a_mixture()
    encoded = encode_group(group(door.order, [0, 0, 0]))
    with pytest.raises(WireError, match="extras has no 'routed_experts'"):
        door.insert(encoded.header, encoded.frames)


def test_more_than_256_experts_take_two_bytes() -> None:
    many = Routers(layers=1, chosen=8, experts=384)
    (first, *_) = group(Door().order, [0]).trajectories
    given = routed(first, many)
    assert given.extras[ROUTED_EXPERTS].dtype == np.int16 and not routing_fault(given, many)
    assert "must be uint8" in routing_fault(given, replace(many, experts=256))


@pytest.mark.parametrize("said", [None, [], [1, 2], [1, 2, True], [1, 2, "3"], [0, 2, 3], "123"], ids=str)
def test_what_announces_no_routers_is_none(said: object) -> None:
    assert announced_routers({ROUTERS: said}) is None
    assert (
        announced_routers({ROUTERS: row_of_routers(MODEL)}) == MODEL
        and announced_routers({ROUTERS: row_of_routers(None)}) is None
    )


def test_a_worker_that_records_them_finds_them_missing() -> None:
    parts = RewardParts.of(AdvantageConfig(), SamplingParams(temperature=1.0, max_new_tokens=4, record_routing=True))
    first, *_ = group(Door().order, [0]).trajectories
    assert parts.complete([routed(first)], None)
    with pytest.raises(EpisodeError, match=r"trajectory 0: extras has no 'routed_experts'.*learner.router_replay"):
        parts.complete([first], None)
