"""What is recorded beside the tokens, at the door of the replay: a group that the learner would end on is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.errors import EpisodeError, WireError
from asyncrl.recorded import ROUTERS, SUPPORT, announced_routers, routed_tokens, routing_fault, row_of_routers
from asyncrl.replay.codec.group import encode_group
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.schema import AdvantageConfig
from asyncrl.types import (
    REF_LOGPROBS,
    ROUTED_EXPERTS,
    SUPPORT_BITS,
    SUPPORT_COUNTS,
    SUPPORT_IDS,
    TOPK_IDS,
    TOPK_LOGPROBS,
    DropReason,
    Routers,
    SamplingParams,
    Trajectory,
)
from tests.replay.helpers import group
from tests.replay.server.test_fuzz import Door

Extras = dict[str, np.ndarray]
MODEL = Routers(layers=3, chosen=2, experts=5)
HALF = float(np.log(0.5))


def reference(trajectory: Trajectory) -> Extras:
    """Of two prompt tokens, whose values are of no matter, and three sampled ones."""
    return {REF_LOGPROBS: np.array([np.nan, 5.0, -1.0, -2.0, 0.0], np.float32)}


def routing(trajectory: Trajectory, model: Routers = MODEL) -> Extras:
    table = np.random.default_rng(0).random((routed_tokens(trajectory), model.layers, model.experts)).argsort(-1)
    return {ROUTED_EXPERTS: table[..., : model.chosen].astype(model.dtype)}


def topk(trajectory: Trajectory) -> Extras:
    """Of each token two, each of probability a half but for the last, which has one alone."""
    count = int(trajectory.loss_mask.sum())
    ids, logprobs = np.tile(np.array([1, 0], np.int32), (count, 1)), np.full((count, 2), HALF, np.float32)
    logprobs[-1] = 0.0, -np.inf
    return {TOPK_IDS: ids, TOPK_LOGPROBS: logprobs}


def support(trajectory: Trajectory) -> Extras:
    """Each token was drawn from itself and token 0; the last from all."""
    own = trajectory.token_ids[trajectory.loss_mask]
    counts = np.full(len(own), 2, np.int32)
    counts[-1] = 0
    ids = np.stack([np.zeros_like(own), own], 1)[:-1].flatten().astype(np.int32)
    return dict(zip(SUPPORT, (counts, ids, np.zeros((0, 1), np.uint8)), strict=True))


KINDS: dict[str, Callable[[Trajectory], Extras]] = {
    REF_LOGPROBS: reference,
    ROUTED_EXPERTS: routing,
    "topk_": topk,
    "support_": support,
}
"""How the names of their extras begin -> good ones of a trajectory."""

WRONG: dict[str, dict[str, Callable[[np.ndarray], np.ndarray | None]]] = {
    REF_LOGPROBS: {
        "nan": lambda array: np.array([0.0, 0.0, -1.0, np.nan, -1.0], np.float32),
        "infinite": lambda array: np.array([0.0, 0.0, -1.0, -np.inf, -1.0], np.float32),
        "positive": lambda array: np.array([0.0, 0.0, -1.0, 0.1, -1.0], np.float32),
        "short": lambda array: array[1:],
        "float64": lambda array: array.astype(np.float64),
    },
    ROUTED_EXPERTS: {
        "absent": lambda array: None,
        "beyond the experts": lambda array: array + np.uint8(5),
        "twice": lambda array: array * np.uint8(0),
        "int64": lambda array: array.astype(np.int64),
        "negative": lambda array: array.astype(np.int16) - 9,
        "a token less": lambda array: array[1:],
        "a layer less": lambda array: array[:, 1:],
        "one expert": lambda array: array[..., :1],
        "flat": lambda array: array.flatten(),
    },
    TOPK_IDS: {
        "negative": lambda array: -1 - array,
        "beyond the vocabulary": lambda array: array + (1 << 30),
        "int64": lambda array: array.astype(np.int64),
        "short": lambda array: array[1:],
        "flat": lambda array: array.flatten(),
    },
    TOPK_LOGPROBS: {
        "one less": lambda array: array[:, 1:],
        "NaN": lambda array: array * np.float32("nan"),
        "infinite": lambda array: -np.float32("inf") * (array - 1),
        "above 0": lambda array: array + np.float32(0.7),
        "more than all": lambda array: array * np.float32(0.5),
    },
    SUPPORT_COUNTS: {
        "short": lambda array: array[:1],
        "no bits": lambda array: np.array([2, 2, -5], np.int32),
    },
    SUPPORT_IDS: {
        "elsewhere": np.zeros_like,
        "beyond the vocabulary": lambda array: np.full_like(array, 1 << 30),
        "negative": lambda array: np.full_like(array, -1),
        "int64": lambda array: np.zeros(4, np.int64),
    },
    SUPPORT_BITS: {"bits of nobody": lambda array: np.zeros((1, 1), np.uint8)},
}


def insert(door: Door, *given: Extras) -> str:
    """Insert a group whose trajectories have these extras; return what becomes of it."""
    made = group(door.order, [0, 0, 0])
    pairs = zip(made.trajectories, given, strict=True)
    encoded = encode_group(replace(made, trajectories=tuple(replace(one, extras=extras) for one, extras in pairs)))
    return door.insert(encoded.header, encoded.frames).body[0]


def of_a_mixture() -> Door:
    door = Door()
    door.core.announce({ROUTERS: [3, 2, 5]})
    return door


def good_ones(kind: str) -> list[Extras]:
    """Of both trajectories of a group."""
    return [KINDS[kind](each) for each in group(Door().order, [0, 0, 0]).trajectories]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_accepted_and_their_absence_where_nobody_needs_them(kind: str) -> None:
    first, second = good_ones(kind)
    assert insert(of_a_mixture() if kind == ROUTED_EXPERTS else Door(), first, second) == "accepted"
    assert insert(Door(), first, {}) == "accepted"
    assert insert(Door(), {}, {}) == "accepted"


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in WRONG for what in WRONG[name]])
def test_what_no_engine_can_have_recorded_is_refused_and_its_group_made_again(name: str, what: str) -> None:
    door = of_a_mixture() if name == ROUTED_EXPERTS else Door()
    (kind,) = (kind for kind in KINDS if name.startswith(kind))
    first, second = good_ones(kind)
    changed = WRONG[name][what](second[name])
    bad = second | {name: changed} if changed is not None else {}
    with pytest.raises(WireError, match=rf"trajectory 1 of group .*{kind}"), np.errstate(all="raise"):
        insert(door, first, bad)
    assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1
    assert door.core.state.in_flight == 0


def test_a_group_without_a_reference_is_refused_once_the_learner_says_that_it_needs_one() -> None:
    good, _ = good_ones(REF_LOGPROBS)
    for second, needed in (({}, "rollout"), (good, "rollout"), ({}, "")):
        door = Door()
        door.core.announce({"reference": needed})
        if needed and not second:
            with pytest.raises(WireError, match=r"1 trajectories of group .*reference.path=rollout"):
                insert(door, good, second)
            assert door.core.state.ledger.dropped[DropReason.REJECTED] == 1
        else:
            assert insert(door, good, second) == "accepted"


def test_of_a_mixture_a_group_without_any_extra_is_refused_and_of_another_model_any_experts_are_taken() -> None:
    with pytest.raises(WireError, match="extras has no 'routed_experts'"):
        insert(of_a_mixture(), {}, {})
    assert insert(Door(), *[{ROUTED_EXPERTS: np.zeros(7)}] * 2) == "accepted"


def test_more_than_256_experts_take_two_bytes() -> None:
    many = Routers(layers=1, chosen=8, experts=384)
    first, _ = group(Door().order, [0]).trajectories
    given = replace(first, extras=routing(first, many))
    assert given.extras[ROUTED_EXPERTS].dtype == np.int16 and not routing_fault(given, many)
    assert "must be uint8" in routing_fault(given, replace(many, experts=256))


@pytest.mark.parametrize("said", [None, [], [1, 2], [1, 2, True], [1, 2, "3"], [0, 2, 3], "123"], ids=str)
def test_what_announces_no_routers_is_none(said: object) -> None:
    assert announced_routers({ROUTERS: said}) is None
    assert (
        announced_routers({ROUTERS: row_of_routers(MODEL)}) == MODEL
        and announced_routers({ROUTERS: row_of_routers(None)}) is None
    )


@pytest.mark.parametrize(
    ("recorded", "good", "missing"),
    [
        ({"record_routing": True}, routing, "'routed_experts'.*learner.router_replay"),
        ({"record_topk": 2}, topk, "'topk_ids'.*engine.record_topk"),
    ],
    ids=["routing", "topk"],
)
def test_a_worker_that_records_them_finds_them_missing(recorded, good, missing: str) -> None:
    parts = RewardParts.of(AdvantageConfig(), SamplingParams(temperature=1.0, max_new_tokens=4, **recorded))
    first, _ = group(Door().order, [0]).trajectories
    parts.check([replace(first, extras=good(first))])
    with pytest.raises(EpisodeError, match=rf"trajectory 0: extras has no {missing}"):
        parts.check([replace(first, extras={})])
