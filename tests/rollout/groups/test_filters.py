from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from asyncrl.checks.rewards import compared_parts
from asyncrl.config import load_config
from asyncrl.errors import FilterError, HopelessFilterError
from asyncrl.replay.client.client import LearnerClient, WorkerRendezvous
from asyncrl.rewards.filter_pool import FilterPool
from asyncrl.rewards.filters import FinishedGroup, Verdict
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.filters import Filters, built_in_filters, zero_variance
from asyncrl.rollout.worker.process import REFUSALS
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.schema import RolloutConfig
from asyncrl.types import DropReason, Prompt, Trajectory
from tests.replay.core.batches.test_order import ORDER
from tests.replay.helpers import group as replay_group
from tests.replay.helpers import replay_config, running_server, settings
from tests.replay.served import Run
from tests.rollout.rollout_fakes import ScriptedReplay, make_worker, prompt_source, rows_file

PROMPT = Prompt(index=0, epoch=0, row=0, token_ids=np.zeros(1, np.int32), text="p", columns={"prompt": "p"})


def made(*members: tuple[float, str]):
    base: Trajectory = replay_group(ORDER, [0]).trajectories[0]
    trajectories = tuple(replace(base, reward=reward, finish_reason=end) for reward, end in members)
    return replace(replay_group(ORDER, [0]), trajectories=trajectories)


FLAT = made((1.0, "stop"), (1.0, "stop"))
MIXED = made((0.0, "stop"), (1.0, "length"))
CUT = made((0.0, "length"), (1.0, "length"))


def shaped(*members: tuple[float, float]):
    """A group of `reward=dapo`: (accuracy as -1 or 1, penalty of the length)."""
    base: Trajectory = replay_group(ORDER, [0]).trajectories[0]
    trajectories = tuple(
        replace(base, reward=right + long, rewards={"right": right, "right/acc": float(right > 0), "overlong": long})
        for right, long in members
    )
    return replace(replay_group(ORDER, [0]), trajectories=trajectories)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ((0.99999994, 1.0), True),
        ((0.0, 0.0), True),
        ((-1.0, -1.0000001), True),
        ((0.0, 1e-9), False),
        ((1.0, 1.001), False),
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_equal(rewards: tuple[float, float], flat: bool):
    assert zero_variance(made(*((reward, "stop") for reward in rewards))) == flat


@pytest.mark.parametrize("named", [[], ["rollout.zero_variance_of=right/acc"], ["rollout.zero_variance_of=right"]])
def test_dynamic_sampling_compares_accuracy_and_not_lengths(named):
    """Yu et al. 2025, section 3.2: prompts whose accuracy is 0 or 1 are left out."""
    given = [
        "model.path=m",
        "data.path=d.jsonl",
        "reward=dapo",
        "advantage=grpo_std",
        "rollout.drop_zero_variance=true",
    ]
    config = load_config([*given, *named])
    filters = Filters(built_in_filters(config.rollout, compared_parts(config)))
    groups = [
        shaped((-1.0, 0.0), (-1.0, -0.5)),
        shaped((1.0, -0.5), (1.0, 0.0)),
        shaped((1.0, 0.0), (-1.0, 0.0)),
        shaped((1.0, -1.0), (-1.0, 0.0)),
    ]
    said = [asyncio.run(filters.why_dropped(group, PROMPT)) for group in groups]
    assert [unwanted is not None for unwanted in said] == [True, True, False, False]


def test_the_recipe_of_dapo_filters_by_accuracy():
    given = ["model.path=m", "data.path=d.jsonl", "eval.sets.aime24.path=e.jsonl"]
    config = load_config(["experiment=dapo_math_17k", *given])
    assert config.rollout.drop_zero_variance and compared_parts(config) == ("right",)
    assert compared_parts(load_config(["reward=gsm8k", *given[:2]])) == ()


@pytest.mark.parametrize(
    ("wanted", "reasons"),
    [
        ({}, [None, None, None]),
        ({"drop_zero_variance": True}, [DropReason.FILTERED_ZERO_VARIANCE, None, None]),
        ({"drop_truncated": "any"}, [None, DropReason.OVER_LENGTH, DropReason.OVER_LENGTH]),
        ({"drop_truncated": "all"}, [None, None, DropReason.OVER_LENGTH]),
    ],
)
def test_each_filter_drops_what_it_says(wanted, reasons):
    filters = Filters(built_in_filters(RolloutConfig(**wanted)))
    said = [asyncio.run(filters.why_dropped(group, PROMPT)) for group in (FLAT, MIXED, CUT)]
    assert [unwanted and unwanted.reason for unwanted in said] == reasons


@pytest.mark.timeout(400)
def test_a_worker_reports_what_it_filters_and_inserts_the_rest(tmp_path):
    async def scenario():
        replay = ScriptedReplay(20)
        filters = Filters([(DropReason.FILTERED_ZERO_VARIANCE, lambda group: group.group_id % 2 == 0)])
        await make_worker(replay, rows_file(tmp_path / "rows.jsonl", 10), filters=filters).run()
        return replay

    replay = asyncio.run(scenario())
    assert {group.group_id % 2 for group in replay.inserted} == {1}
    assert {assignment.group_id % 2 for assignment, _, _ in replay.failed} == {0}
    assert {reason for _, reason, _ in replay.failed} == {DropReason.FILTERED_ZERO_VARIANCE}
    assert len(replay.inserted) + len(replay.failed) == 20


OWN = """
def keep(group):
    if group.row["n"] == 4:
        raise ValueError("four")
    if group.row["n"] == 7:
        return "seven, of " + str(len(group.completions))
    return group.row["n"] != 2
"""


@pytest.mark.timeout(400)
def test_filters_of_the_user_drop_with_their_name_and_fail_with_their_error(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)

    async def scenario():
        replay = ScriptedReplay(20)
        async with FilterPool(f"{tmp_path}/mine.py:keep", timeout_s=60) as pool:
            filters = Filters(own=[pool])
            await make_worker(replay, rows_file(tmp_path / "rows.jsonl", 10), filters=filters).run()
        return replay

    replay = asyncio.run(scenario())
    said = {order.prompt_index % 10: (reason, detail) for order, reason, detail in replay.failed}
    assert said.keys() == {2, 4, 7}
    assert said[2] == (DropReason.FILTERED, "keep")
    assert said[7] == (DropReason.FILTERED, "keep: seven, of 4")
    assert said[4][0] is DropReason.FAILED_FILTER and "ValueError: four" in said[4][1]
    assert len(replay.inserted) == 14 and len(replay.failed) == 6


@dataclass
class ScriptedPool:
    """Fails for every group with one of `bad`'s rows."""

    bad: Callable[[int], bool]
    name: str = "keep"

    async def judge(self, group: FinishedGroup) -> Verdict:
        if self.bad(group.row["n"]):
            raise FilterError("mine.py:keep: KeyError: 'level'")
        return Verdict(True)


def filtered(rows: Path, bad: Callable[[int], bool], groups: int, share: float) -> ScriptedReplay:
    replay = ScriptedReplay(groups)
    own = cast("list[FilterPool]", [ScriptedPool(lambda n: False), ScriptedPool(bad)])
    filters = Filters(own=own, max_failure_share=share, where=prompt_source(rows).where)
    asyncio.run(make_worker(replay, rows, filters=filters).run())
    return replay


def test_a_filter_that_never_works_ends_its_worker_with_the_message_the_row_and_the_line(tmp_path):
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    with pytest.raises(HopelessFilterError) as ended:
        filtered(rows, lambda n: True, 64, 0.5)
    said = str(ended.value)
    row = int(said.split("The last group, row ")[1].split()[0])
    # Groups of four: the 26th is the first beyond a hundred completions, whatever another filter did beside it.
    assert "failed for 104 of the last 104 completions, more than reward.max_failure_share=0.5 of 200" in said
    assert f"({rows}:{row + 1}): mine.py:keep: KeyError: 'level'" in said
    assert isinstance(ended.value, REFUSALS), "a restart cannot help"


def test_a_filter_that_fails_for_a_few_or_is_allowed_to_does_not_end_the_run(tmp_path):
    rows = rows_file(tmp_path / "rows.jsonl", 64)
    replay = filtered(rows, lambda n: n % 3 == 0, 128, 0.5)
    assert len(replay.failed) + len(replay.inserted) == 128
    assert {reason for _, reason, _ in replay.failed} == {DropReason.FAILED_FILTER}
    assert len(filtered(rows, lambda n: True, 128, 1.0).failed) == 128


STEPS, GROUPS = 12, 4


@pytest.mark.timeout(400)
def test_a_dropped_group_makes_room_for_exactly_one_other_prompt(tmp_path):
    """A real worker beside a learner: with every group that is filtered one more is admitted, and none besides."""

    async def reward_some(texts, row, **_):
        flat = row["n"] % 3 == 0
        return [RewardScore(value=0.0 if flat else float(place)) for place, _ in enumerate(texts)]

    # The fake engine goes on serving version 0.
    admission = settings(groups_per_step=GROUPS, group_size=4, max_staleness=STEPS, pipeline_depth=1)
    config = replay_config()

    def train(learner: LearnerClient, engines: WorkerRendezvous) -> tuple[list[int], Mapping[str, float]]:
        prompts = []
        for step in range(STEPS):
            plan = learner.lease(step=step, rank=0, world=1, wait_s=60).plan
            prompts += [group.prompt_index for group in plan.groups]
            metrics = learner.trained(step=step, policy_version=step + 1).metrics
            engines.served(step + 1, "f")
        learner.finish()
        return prompts, metrics

    async def work(run: Run) -> tuple[list[int], Mapping[str, float], dict[str, float]]:
        report = WorkerReport()
        filters = Filters(built_in_filters(RolloutConfig(drop_zero_variance=True)))
        rows = rows_file(tmp_path / "rows.jsonl", 100)
        rollout = run.worker("rollout-0", stats=report)
        engines = rollout.rendezvous()
        engines.served(0, "f")
        worker = make_worker(rollout, rows, filters=filters, score=reward_some, report=report)
        (prompts, metrics), _ = await asyncio.gather(asyncio.to_thread(train, run.learner, engines), worker.run())
        return prompts, metrics, report()

    with running_server(config, admission), contextlib.closing(Run(config)) as run:
        run.start()
        prompts, metrics, counts = asyncio.run(work(run))
        kept = run.learner.snapshot()
    filtered, left = (kept["dropped"].get(reason, 0) for reason in ("filtered_zero_variance", "shutdown"))
    assert len(prompts) == len(set(prompts)) == STEPS * GROUPS
    assert not any(prompt % 100 % 3 == 0 for prompt in prompts), "a filtered group was trained"
    assert metrics["data/zero_variance"] > 0, "what a filter drops was measured all the same"
    assert 0 < filtered <= counts["groups_filtered"] <= filtered + left  # what is told after the end is dropped by it
    assert kept["cursor"] == STEPS * GROUPS + filtered + left
    assert left <= 2 * GROUPS, "more was admitted than the window and the refills"
