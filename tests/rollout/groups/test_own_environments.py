"""User environments in the worker's loop, starting with that of docs/environments.md."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.environments.base import Environment, Episodes, EpisodeTools
from asyncrl.environments.guard import GuardedEnvironment
from asyncrl.environments.registry import make_environment
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import NoProgress, RewardError
from asyncrl.evaluation.orders import EvalAssignment
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.groups.episode import GroupShape
from asyncrl.rollout.rewards.parts import RewardParts
from asyncrl.rollout.worker import worker as worker_module
from asyncrl.schema import EnvironmentConfig
from asyncrl.types import REF_LOGPROBS, DropReason, Prompt
from tests.environments.pages import write_programs
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, rows_file

pytestmark = pytest.mark.timeout(400)

GROUPS = 12


def work(environment: Environment, tmp_path: Path, **changes: Any) -> ScriptedReplay:
    async def scenario() -> ScriptedReplay:
        replay = ScriptedReplay(GROUPS, changes.pop("evaluations", None))
        shape = GroupShape(size=4, fewest=4, tries=2)
        path = rows_file(tmp_path / "rows.jsonl", GROUPS)
        await make_worker(replay, path, **{"environment": environment, "shape": shape, **changes}).run()
        return replay

    return asyncio.run(scenario())


class Deaf:
    """Waits for something that does not come, and catches its cancellation."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        while not self.came.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.came.wait()
        raise KeyError("what came is of no use")


def test_an_environment_that_catches_its_cancellation_does_not_keep_a_failed_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "TURN_S", 0.01)
    monkeypatch.setattr(worker_module, "CANCEL_S", 0.05)

    async def scenario() -> None:
        deaf = Deaf()
        path = rows_file(tmp_path / "rows.jsonl", GROUPS)
        guarded = GuardedEnvironment("deaf.py:Deaf", deaf, 264)
        worker = make_worker(ScriptedReplay(GROUPS), path, environment=guarded, wait_timeout_s=0.1)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(NoProgress, match="or an environment waits for something else"):
                    await worker.run()
        finally:
            deaf.came.set()

    asyncio.run(scenario())


class Wrong(SingleTurn):
    """Raises for odd prompts, and forgets a trajectory of every fourth."""

    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        if prompt.index % 2:
            raise KeyError(f"prompt {prompt.index}")
        episodes = await super().run(prompt, size, tools)
        forgotten = 1 if prompt.index % 4 == 0 else 0
        return replace(episodes, trajectories=episodes.trajectories[forgotten:], texts=episodes.texts[forgotten:])


def test_an_environment_that_fails_costs_its_groups_and_not_the_worker(tmp_path: Path) -> None:
    guarded = GuardedEnvironment("wrong.py:Wrong", Wrong(), 264)
    replay = work(guarded, tmp_path)
    assert sorted(group.prompt_index for group in replay.inserted) == [2, 6, 10]
    failed = {order.prompt_index: (reason, detail) for order, reason, detail in replay.failed}
    assert len(failed) == len(replay.failed) == 9
    for index, (reason, detail) in failed.items():
        assert reason is DropReason.FAILED_ENVIRONMENT
        why = f"KeyError: 'prompt {index}'" if index % 2 else "got 3 trajectories and 0 failures, but 4 episodes"
        assert detail.startswith(f"environment.name=wrong.py:Wrong: {why}")
    assert guarded.stats() == {"environment_failures": 9.0}


def test_rows_of_an_evaluation_that_fail_have_no_score(tmp_path: Path) -> None:
    evaluation = EvalAssignment(job_id=1, chunk=0, attempt=0, eval_set="heldout", start=0, stop=4)
    guarded = GuardedEnvironment("wrong.py:Wrong", Wrong(), 264)
    (result,) = work(guarded, tmp_path, evaluations=[evaluation]).results
    assert (len(result.scores), result.failed) == (1, 3)


@pytest.mark.parametrize("attached", ["nothing", "half", "all"])
def test_log_probs_of_the_reference_are_asked_for_where_the_group_is_made(tmp_path: Path, attached: str) -> None:
    class Teaching(SingleTurn):
        async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
            episodes = await super().run(prompt, size, tools)
            taught = [
                replace(one, extras={REF_LOGPROBS: np.full(len(one.token_ids), value, np.float32)})
                for one, value in zip(episodes.trajectories, (-1.0, -1.0, value, value), strict=True)
            ]
            return replace(episodes, trajectories=tuple(taught if attached != "nothing" else episodes.trajectories))

    value = np.nan if attached == "half" else -1.0
    environment = GuardedEnvironment("teaching.py:Teaching", Teaching(), 264)
    replay = work(environment, tmp_path, parts=RewardParts(reference=True))
    assert len(replay.inserted) == (GROUPS if attached == "all" else 0)
    for _, reason, detail in replay.failed:
        assert reason is DropReason.FAILED_ENVIRONMENT
        says = {
            "nothing": "trajectory 0: extras has no 'ref_logprobs'",
            "half": "trajectory 2: extras['ref_logprobs'] must",
        }
        assert says[attached] in detail and "reference.path=MODEL" in detail


class SecondIsRight:
    """Of the first answers every other one is wrong; what is answered then is right, but for member 3 of odd rows."""

    async def __call__(self, texts: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
        if len(texts) > 1:
            return [RewardScore(value=float(place % 2 == 0)) for place in range(len(texts))]
        if row["n"] % 2:
            raise RewardError("none")
        return [RewardScore(value=1.0)]


def test_the_environment_of_the_page_takes_a_second_turn(tmp_path: Path) -> None:
    write_programs(tmp_path)
    environment = make_environment(EnvironmentConfig(name=f"{tmp_path}/second_try.py:SecondTry"), 264)
    shape = GroupShape(size=4, fewest=2, tries=1)
    replay = work(environment, tmp_path, score=SecondIsRight(), shape=shape)
    assert replay.failed == [] and len(replay.inserted) == GROUPS
    for group in replay.inserted:
        odd = group.prompt_index % 2
        assert len(group.trajectories) == (2 if odd else 4)
        for place, one in enumerate(group.trajectories):
            text = bytes(one.token_ids[one.token_ids < 256].astype(np.uint8).tolist())
            turns = 2 if not odd and place % 2 else 1
            assert one.reward == 1.0 and text.startswith(b"%d>" % group.prompt_index)
            assert np.count_nonzero(np.diff(one.loss_mask.astype(int)) == 1) == turns
            observed = one.token_ids[one.prompt_length :][~one.loss_mask[one.prompt_length :]]
            assert bytes(observed.astype(np.uint8).tolist()) == (b"no! again>" if turns == 2 else b"")
            assert group.completion_texts[place].count(" | ") == turns - 1
