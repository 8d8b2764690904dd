"""Members and the greedy completion side by side: each is retried alone, and neither outlives the other's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.errors import AsyncRLError, GenerationError, RewardError
from asyncrl.rewards.score import Outcome
from asyncrl.rollout.groups.episode import EpisodeRunner, GroupShape
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.schema import AdvantageConfig
from asyncrl.types import GREEDY_REWARD, Prompt, Trajectory, TrajectoryGroup
from tests.rollout.rollout_fakes import SAMPLING, ByteTokenizer, assignment, encode_bytes

pytestmark = pytest.mark.timeout(400)

SIZE, TRIES = 4, 3
SHAPE = GroupShape(size=SIZE, fewest=SIZE, tries=TRIES)
PROMPT = Prompt(index=0, epoch=0, row=0, text="p", token_ids=np.array([1], dtype=np.int32), columns={})

Act = Callable[[int], Awaitable[Episodes]]
"""What a side does in its call number so and so, from 0."""


class TwoSides:
    """An environment whose members and greedy completion do as they are told, and that knows which of them run."""

    def __init__(self, members: Act, greedy: Act) -> None:
        self.acts = {"members": members, "greedy": greedy}
        self.calls = {"members": 0, "greedy": 0}
        self.running: list[str] = []
        self.both = asyncio.Event()

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        side = "members" if size == SIZE else "greedy"
        call, self.calls[side] = self.calls[side], self.calls[side] + 1
        self.running.append(side)
        if len(self.running) == 2:
            self.both.set()
        try:
            await self.both.wait()  # nothing fails before the other side is at work
            return await self.acts[side](call)
        finally:
            await asyncio.sleep(0)  # an engine takes a moment to forget a request
            self.running.remove(side)


async def never_asked(texts: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
    raise AssertionError


async def forever(call: int) -> Episodes:
    await asyncio.Event().wait()
    raise AssertionError


def fails(error: Exception) -> Act:
    async def act(call: int) -> Episodes:
        raise error

    return act


def made(reward: float, count: int) -> Episodes:
    arrays = {
        "token_ids": np.array([1, 2], dtype=np.int32),
        "loss_mask": np.array([False, True]),
        "behavior_logprobs": np.zeros(2, dtype=np.float32),
        "policy_versions": np.zeros(2, dtype=np.int32),
    }
    one = Trajectory(**arrays, reward=reward, rewards={}, finish_reason="stop")
    return Episodes(trajectories=(one,) * count, texts=("text",) * count)


async def group_of(environment: TwoSides) -> TrajectoryGroup:
    runner = EpisodeRunner(
        engine=FakeEngine(vocabulary=8),
        environment=environment,
        encode=encode_bytes,
        decode=ByteTokenizer().decode,
        score=never_asked,
        parts=RewardParts.of(AdvantageConfig(baseline="greedy"), SAMPLING),
    )
    return await runner.run_group(assignment(0), PROMPT, shape=SHAPE, sampling=SAMPLING, worker="w")


@pytest.mark.parametrize(
    "error", [RewardError("no score"), GenerationError("out of memory"), KeyError("a bug")], ids=repr
)
@pytest.mark.parametrize("failing", ["members", "greedy"])
def test_when_one_side_fails_the_other_has_ended_before_the_failure_is_reported(failing: str, error: Exception) -> None:
    async def scenario() -> None:
        sides = {"members": forever, "greedy": forever, failing: fails(error)}
        environment = TwoSides(**sides)
        with pytest.raises(type(error)) as raised:
            await group_of(environment)
        assert raised.value is error
        assert not environment.running
        assert asyncio.all_tasks() == {asyncio.current_task()}
        again = failing == "greedy" and isinstance(error, AsyncRLError)
        assert environment.calls[failing] == (TRIES if again else 1)

    asyncio.run(scenario())


def test_when_the_group_is_cancelled_both_sides_have_ended() -> None:
    async def scenario() -> None:
        environment = TwoSides(forever, forever)
        group = asyncio.create_task(group_of(environment))
        await environment.both.wait()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert not environment.running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "returned"])
def test_a_greedy_completion_that_fails_is_made_again_and_costs_no_member(raised: bool) -> None:
    async def scenario() -> None:
        async def third_time(call: int) -> Episodes:
            if call < TRIES - 1 and raised:
                raise RewardError(f"no score in try {call}")
            if call < TRIES - 1:
                return Episodes(trajectories=(), texts=(), failures=(RewardError(f"no score in try {call}"),))
            return made(0.25, 1)

        async def at_once(call: int) -> Episodes:
            return made(1.0, SIZE)

        environment = TwoSides(at_once, third_time)
        group = await group_of(environment)
        assert environment.calls == {"members": 1, "greedy": TRIES}
        assert [t.rewards[GREEDY_REWARD] for t in group.trajectories] == [0.25] * SIZE

    asyncio.run(scenario())


def test_the_last_failure_of_a_greedy_completion_that_never_comes_is_the_reason() -> None:
    async def scenario() -> None:
        async def never(call: int) -> Episodes:
            return Episodes(trajectories=(), texts=(), failures=(RewardError(f"no score in try {call}"),))

        with pytest.raises(RewardError, match=f"no score in try {TRIES - 1}"):
            await group_of(TwoSides(forever, never))

    asyncio.run(scenario())
