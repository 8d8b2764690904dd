from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time

import numpy as np
import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import (
    ConfigError,
    DataError,
    GenerationError,
    HopelessRunError,
    NoProgress,
    RewardError,
    WeightsError,
)
from asyncrl.evaluation.orders import EvalAssignment
from asyncrl.replay.core.live.workers import LOST
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.evaluated import EvaluatedSet
from asyncrl.rollout.groups.filters import Filters
from asyncrl.rollout.worker import report as report_module
from asyncrl.rollout.worker import worker as worker_module
from asyncrl.rollout.worker.process import REFUSALS
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.types import NO_VERSION, DropReason
from tests.rollout.rollout_fakes import SAMPLING, ScriptedReplay, make_worker, prompt_source, rows_file

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def rows(tmp_path):
    return rows_file(tmp_path / "rows.jsonl", 10, bad=(3,))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(worker_module, "TURN_S", 0.05)


def chunk(start: int, stop: int) -> EvalAssignment:
    return EvalAssignment(job_id=1, chunk=0, attempt=0, eval_set="heldout", start=start, stop=stop)


class LateClock:
    """The worker's `time`: the real one, and as much later as the test says."""

    def __init__(self):
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def run(replay_of, file, **changes):
    async def scenario():
        replay = replay_of()
        await make_worker(replay, file, **changes).run()
        return replay

    return asyncio.run(scenario())


def test_every_sampled_token_is_told_with_what_became_of_it(rows):
    """A row gets no reward, every fourth group is dropped by a filter, an evaluation is made beside."""
    report = WorkerReport()
    dropped = Filters([(DropReason.FILTERED_ZERO_VARIANCE, lambda group: group.group_id % 4 == 0)])
    replay = run(lambda: ScriptedReplay(20, [chunk(4, 6)]), rows, report=report, filters=dropped)
    told = report()
    inserted = sum(int(one.loss_mask.sum()) for group in replay.inserted for one in group.trajectories)
    lost = {name: told.get(stat, 0) for name, stat in LOST.items() if told.get(stat)}
    assert lost.keys() == {"evaluation", "failed_reward", "filtered_zero_variance"}
    assert told["tokens_inserted"] == inserted > 0
    assert inserted + sum(lost.values()) == told["generated_tokens"]


def test_tokens_that_the_server_refuses_are_lost(rows):
    report = WorkerReport()

    def refusing():
        replay = ScriptedReplay(3)
        replay.insert_status = "fenced"
        return replay

    run(refusing, rows, report=report)
    assert report()["tokens_lost_refused"] == report()["generated_tokens"] > 0
    assert report()["tokens_inserted"] == 0


def test_the_rows_are_counted_to_the_server_before_anything_is_asked_for_where_it_draws_by_what_is_measured(rows):
    replay = run(lambda: ScriptedReplay(5), rows, rows=(10,))
    assert replay.surveyed == (10,)
    assert run(lambda: ScriptedReplay(5), rows).surveyed is None


def test_every_assignment_comes_back_once_inserted_or_failed_with_its_reason(rows):
    replay = run(lambda: ScriptedReplay(50), rows)
    inserted = {group.group_id for group in replay.inserted}
    failed = {assignment.group_id for assignment, _, _ in replay.failed}
    assert inserted | failed == {100 + index for index in range(50)}
    assert not inserted & failed
    assert failed == {100 + index for index in range(50) if index % 10 == 3}
    assert all(reason is DropReason.FAILED_REWARD and "is bad" in detail for _, reason, detail in replay.failed)


def test_a_group_carries_its_assignment_and_the_engine_s_own_tokens(rows):
    replay = run(lambda: ScriptedReplay(3), rows)
    group = next(group for group in replay.inserted if group.prompt_index == 2)
    assert (group.group_id, group.attempt, group.worker, group.prompt_text) == (102, 1, "rollout-0", "2>")
    engine = FakeEngine(vocabulary=128)
    engine.load_weights(0, {})
    request = GenerateRequest(request_id="r", prompt_ids=np.array([50, 62], np.int32), n=4, sampling=SAMPLING, seed=14)
    expected = asyncio.run(engine.generate(request))
    for trajectory, completion, text in zip(group.trajectories, expected, group.completion_texts, strict=True):
        assert trajectory.token_ids.tolist() == [50, 62, *completion.token_ids.tolist()]
        assert trajectory.behavior_logprobs[2:].tolist() == completion.logprobs.tolist()
        assert trajectory.reward == len(text) == trajectory.rewards["letters"]


def test_one_member_of_a_group_is_made_alone_and_no_filter_judges_it(rows):
    class Members(ScriptedReplay):
        async def acquire(self, **asked):
            acquired = await super().acquire(**asked)
            singles = tuple(dataclasses.replace(order, single=True) for order in acquired.assignments)
            return dataclasses.replace(acquired, assignments=singles)

    every = Filters([(DropReason.FILTERED_ZERO_VARIANCE, lambda group: True)])
    replay = run(lambda: Members(3), rows, filters=every)
    assert [len(group.trajectories) for group in replay.inserted] == [1, 1, 1]


def test_no_more_groups_are_in_flight_than_slots_and_requests_are_batched(rows):
    replay = run(lambda: ScriptedReplay(200), rows, slots=16)
    assert replay.most_in_flight <= 16
    assert len(replay.asked) < 150


def test_an_evaluation_scores_its_rows_and_says_why_some_have_no_score(rows, caplog):
    report = WorkerReport()
    replay = run(lambda: ScriptedReplay(5, [chunk(2, 8)]), rows, report=report)
    (result,) = replay.results
    assert (result.job_id, result.version_min, result.version_max) == (1, 0, 0)
    assert (len(result.scores), result.failed, result.missing) == (5, 1, 0)
    assert report()["evaluation_rows"] == 5
    assert "1 of 6 samples of evaluation heldout have no score; the first: row 3 is bad" in caplog.text


def test_several_samples_of_a_row_are_one_score_and_the_figures_that_they_allow(rows):
    async def first_is_right(texts, row, **_):
        if row["n"] == 4:
            raise RewardError("row 4 is bad")
        bad = RewardError("the second is bad") if row["n"] == 5 else RewardScore(value=0.0)
        return [RewardScore(value=1.0), bad, *[RewardScore(value=0.0)] * (len(texts) - 2)]

    given = EvaluatedSet(rows=prompt_source(rows), sampling=SAMPLING, samples=4, answer="text")
    replay = run(lambda: ScriptedReplay(1, [chunk(2, 6)]), rows, evaluated={"heldout": given}, score=first_is_right)
    (result,) = replay.results
    assert (result.scores, result.failed) == ((0.25, 0.25, pytest.approx(1 / 3)), 1)
    found = result.figures
    assert found["pass@2"] == pytest.approx((0.5, 0.5, 2 / 3)), "of rows 2, 3 and 5"
    assert found["pass@4"] == found["best@4"] == (1.0, 1.0, None), "one sample of row 5 has no score"
    assert found["avg@4"] == pytest.approx(result.scores) and found["maj@4"][2] is None


def test_each_set_is_scored_by_its_own_rows_and_samples_and_one_that_is_not_known_is_refused(rows):
    sets = {
        "heldout": EvaluatedSet(rows=prompt_source(rows), sampling=SAMPLING),
        "hard": EvaluatedSet(rows=prompt_source(rows), sampling=SAMPLING, samples=4),
    }
    asked = [chunk(0, 2), dataclasses.replace(chunk(0, 3), eval_set="hard", job_id=2)]
    replay = run(lambda: ScriptedReplay(1, asked), rows, evaluated=sets)
    plain, sampled = sorted(replay.results, key=lambda result: result.job_id)
    assert (len(plain.scores), plain.figures) == (2, {})
    assert len(sampled.scores) == len(sampled.figures["pass@4"]) == 3
    with pytest.raises(ConfigError, match="asked to evaluate 'heldout', but its evaluation sets are: none"):
        run(lambda: ScriptedReplay(1, [chunk(0, 2)]), rows, evaluated={})


def test_rows_past_the_end_of_the_file_are_not_scored_again(rows):
    replay = run(lambda: ScriptedReplay(1, [chunk(8, 16), chunk(16, 24)]), rows)
    rest, nothing = sorted(replay.results, key=lambda result: result.missing)
    assert (len(rest.scores), rest.failed, rest.missing) == (2, 0, 6)
    assert (len(nothing.scores), nothing.failed, nothing.missing) == (0, 0, 8)
    assert (nothing.version_min, nothing.version_max) == (NO_VERSION, NO_VERSION)


def test_an_accuracy_scores_right_or_wrong_and_anything_else_has_failed(rows, caplog):
    replay = run(lambda: ScriptedReplay(1, [chunk(0, 3)]), rows, accuracy=True)  # the reward counts letters
    (result,) = replay.results
    assert result.failed + sum(score in (0.0, 1.0) for score in result.scores) == 3 and result.failed
    assert re.search(r"rows\.jsonl:\d: reward\.metric=accuracy, but the score is", caplog.text)


def test_an_evaluation_row_that_can_never_be_used_ends_no_worker(rows):
    replay = run(lambda: ScriptedReplay(0, [chunk(0, 3)]), rows, max_evaluation_tokens=1)
    assert replay.results[0].failed == 3


def test_an_evaluation_holds_no_load_back_and_says_which_versions_it_measured(rows):
    async def scenario():
        replay = ScriptedReplay(0, [chunk(0, 3)])
        engine = FakeEngine(vocabulary=128, latency_s=0.001)
        engine.load_weights(4, {})
        shape = dataclasses.replace(SAMPLING, max_new_tokens=40, stop_token_ids=())
        running = asyncio.create_task(make_worker(replay, rows, engine=engine, sampling=shape).run())
        while engine.stats()["decode_steps"] < 5:
            await asyncio.sleep(0.001)
        assert not replay.results
        engine.load_weights(5, {})  # it returns while the evaluation runs
        assert not replay.results
        await running
        return replay.results

    (result,) = asyncio.run(scenario())
    assert (result.failed, len(result.scores)) == (0, 3)
    assert (result.version_min, result.version_max) == (4, 5)


class HangingEngine(FakeEngine):
    """Whose evaluations hang."""

    async def generate(self, request):
        if request.request_id.startswith("eval"):
            await asyncio.Event().wait()
        return await super().generate(request)


def test_an_evaluation_that_gives_no_token_is_given_up_and_ends_no_worker(rows, monkeypatch):
    clock = LateClock()
    monkeypatch.setattr(worker_module, "time", clock)

    async def scenario():
        replay = ScriptedReplay(8, [chunk(0, 3)])
        engine = HangingEngine(vocabulary=128)
        engine.load_weights(0, {})
        running = asyncio.create_task(make_worker(replay, rows, engine=engine).run())
        while len(replay.inserted) + len(replay.failed) < 8:
            await asyncio.sleep(0.01)
        assert not replay.results
        while not replay.results:
            clock.ahead_s += 1000.0  # again: a last sign of progress may have been seen after the first
            await asyncio.sleep(0.1)
        await running  # the server says stop once the rows were given up
        return replay.results

    (result,) = asyncio.run(scenario())
    assert (result.scores, result.failed) == ((), 3)


def test_the_error_of_the_subscriber_ends_the_worker(rows):
    def check():
        raise WeightsError("fingerprint of bucket 3 differs")

    with pytest.raises(WeightsError, match="bucket 3"):
        run(lambda: ScriptedReplay(5), rows, check=check)


@pytest.mark.parametrize("passes", [True, False])
def test_nothing_leaves_the_worker_before_the_canary_passed_and_nothing_ever_when_it_failed(rows, passes):
    """Index 3 is a row whose reward fails: that needs no proof."""

    async def scenario():
        replay, looks = ScriptedReplay(8, [chunk(0, 2)]), []

        def proven() -> bool:
            looks.append(len(replay.inserted) + len(replay.results))
            return passes and len(looks) > 200

        def check() -> None:
            if len(looks) > 200 and not passes:
                raise WeightsError("the canary failed")

        worker = make_worker(replay, rows, proven=proven, check=check)
        if passes:
            await worker.run()
        else:
            with pytest.raises(WeightsError, match="the canary failed"):
                await worker.run()
        assert looks[:200] == [0] * 200
        return len(replay.inserted), len(replay.results)

    assert asyncio.run(scenario()) == ((7, 1) if passes else (0, 0))


class BrokenEngine(FakeEngine):
    async def generate(self, request):
        raise GenerationError("the engine thread stopped")


def test_an_engine_that_only_fails_ends_the_worker_and_every_attempt_is_reported(rows):
    async def scenario():
        replay = ScriptedReplay(100)
        with pytest.raises(GenerationError, match="thread stopped"):
            await make_worker(replay, rows, engine=BrokenEngine(), slots=4).run()
        return replay

    replay = asyncio.run(scenario())
    assert {reason for _, reason, _ in replay.failed} == {DropReason.FAILED_GENERATION}
    assert 8 <= len(replay.failed) < 20


class KernellessEngine(FakeEngine):
    async def generate(self, request):
        raise GenerationError("request '1.1.0' was not finished: RuntimeError(\"mm not implemented for 'Half'\")")


def test_an_engine_without_a_kernel_for_the_model_ends_the_run(rows):
    with pytest.raises(HopelessRunError, match=r"cannot run this model: .* not implemented for 'Half'") as ended:
        run(lambda: ScriptedReplay(100), rows, engine=KernellessEngine(), slots=4)
    assert isinstance(ended.value, REFUSALS), "a restart cannot help"


class StuckEngine(FakeEngine):
    async def generate(self, request):
        await asyncio.sleep(600)
        raise AssertionError


def test_an_engine_that_makes_no_token_ends_the_worker_at_the_deadline(rows):
    started = time.monotonic()
    with pytest.raises(NoProgress, match=r"rollout-0"):
        run(lambda: ScriptedReplay(5), rows, engine=StuckEngine(), wait_timeout_s=0.3)
    assert time.monotonic() - started < 100


def test_waiting_for_admission_is_not_a_standstill(rows):
    async def scenario():
        replay = ScriptedReplay(0)
        replay.total = 1
        replay.issued = 1  # nothing to hand out, nothing back yet
        worker = make_worker(replay, rows, wait_timeout_s=0.1)
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(0.5)
        assert not running.done()
        replay.total = 0
        replay.changed.set()
        await running

    asyncio.run(scenario())


def test_a_row_that_can_never_be_used_ends_the_worker(rows):
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*data\.max_prompt_tokens"):
        run(lambda: ScriptedReplay(1), rows, max_prompt_tokens=1)


def test_an_over_long_row_drops_its_group_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * (99 if n == 5 else 3), "n": n}) + "\n" for n in range(16)))
    replay = ScriptedReplay(16)
    report = WorkerReport()
    worker = make_worker(replay, path, overlong="drop", report=report)
    asyncio.run(worker.run())
    assert len(replay.inserted) == 15
    ((_, reason, detail),) = replay.failed
    assert reason is DropReason.OVER_LENGTH and f"{path}:6: the prompt has 99 tokens" in detail


def test_a_fenced_insert_is_counted_and_the_worker_goes_on(rows):
    def fencing():
        replay = ScriptedReplay(10)
        replay.insert_status = "fenced"
        return replay

    report = WorkerReport()
    run(fencing, rows, report=report)
    assert report()["groups_fenced"] == 9


def test_the_report_counts_time_as_waiting_or_as_busy_and_tokens_of_the_engine(rows):
    report = WorkerReport()
    run(lambda: ScriptedReplay(20), rows, report=report)
    stats = report()
    assert stats["busy_s"] > 0 and stats["waiting_s"] >= 0
    assert stats["generated_tokens"] > 0
    assert (stats["groups_accepted"], stats["groups_failed"]) == (18, 2)


def test_all_time_since_the_clocks_were_started_is_either_waiting_or_busy(monkeypatch):
    clock = LateClock()
    monkeypatch.setattr(report_module, "time", clock)
    clock.monotonic = lambda: clock.ahead_s
    report = WorkerReport()
    clock.ahead_s = 7.0
    report.start_clocks()
    for place, working in enumerate((True, True, False, True, False)):
        clock.ahead_s += 2.0**place
        report.working(working)
        assert report()["busy_s"] + report()["waiting_s"] == clock.ahead_s - 7.0
    assert (report()["waiting_s"], report()["busy_s"]) == (1 + 8, 2 + 4 + 16)
    report.add(lambda: {"busy_s": 0.5, "waiting_s": 0.5})
    assert (report()["waiting_s"], report()["busy_s"]) == (9, 22), "an engine's own took their place"


def test_cancelling_the_worker_cancels_its_groups(rows):
    async def scenario():
        replay = ScriptedReplay(5)
        running = asyncio.create_task(make_worker(replay, rows, engine=StuckEngine()).run())
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


class SlowTools:
    """An environment that asks tools for much longer than a worker may be silent, and makes no token meanwhile."""

    def __init__(self, clock: LateClock, step_s: float):
        self.clock, self.step_s = clock, step_s

    async def run(self, prompt, size, tools):
        for _ in range(5):
            self.clock.ahead_s += self.step_s
            await asyncio.sleep(0.2)  # a few turns of the worker's loop
            await tools.score(["a look at the world"], prompt.columns)
            await asyncio.sleep(0.2)
        return await SingleTurn().run(prompt, size, tools)


@pytest.mark.parametrize("step_s", [40.0, 70.0])
def test_environment_steps_are_progress_without_a_token(rows, monkeypatch, step_s):
    clock, report = LateClock(), WorkerReport()
    monkeypatch.setattr(worker_module, "time", clock)
    changes = {"environment": SlowTools(clock, step_s), "report": report, "wait_timeout_s": 60.0}
    if step_s > 60:
        with pytest.raises(NoProgress):
            run(lambda: ScriptedReplay(1), rows, **changes)
        return
    replay = run(lambda: ScriptedReplay(1), rows, **changes)
    assert len(replay.inserted) == 1
    stats = report()
    assert stats["environment_steps"] == 7
    assert stats["progress"] >= stats["generated_tokens"] + 7
