from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import DataError, GenerationError, NoProgress, WeightsError
from asyncrl.rollout import worker as worker_module
from asyncrl.rollout.report import WorkerReport
from asyncrl.rollout.version_hold import VersionHold
from asyncrl.types import DropReason, EvalAssignment
from tests.rollout.rollout_fakes import SAMPLING, ScriptedReplay, make_worker, rows_file

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def rows(tmp_path):
    return rows_file(tmp_path / "rows.jsonl", 10, bad=(3,))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr(worker_module, "TURN_S", 0.05)


def chunk(start: int, stop: int, version: int = 0) -> EvalAssignment:
    return EvalAssignment(
        job_id=1, chunk=0, attempt=0, eval_set="heldout", start=start, stop=stop, policy_version=version
    )


def run(replay_of, rows, **changes):
    async def scenario():
        replay = replay_of()
        await make_worker(replay, rows, **changes).run()
        return replay

    return asyncio.run(scenario())


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


def test_no_more_groups_are_in_flight_than_slots_and_requests_are_batched(rows):
    replay = run(lambda: ScriptedReplay(200), rows, slots=16)
    assert replay.most_in_flight <= 16
    assert len(replay.asked) < 150


def test_an_evaluation_scores_its_rows_and_counts_the_failed_ones(rows):
    report = WorkerReport()
    replay = run(lambda: ScriptedReplay(5, [chunk(2, 8)]), rows, report=report)
    (result,) = replay.results
    assert (result.job_id, result.policy_version, result.failed, len(result.scores)) == (1, 0, 1, 5)
    assert report()["evaluation_rows"] == 5


def test_an_evaluation_has_one_version_although_weights_keep_arriving(rows):
    async def scenario():
        replay = ScriptedReplay(0, [chunk(0, 3)] * 5)
        engine = FakeEngine(vocabulary=128, latency_s=0.001)
        engine.load_weights(0, {})
        hold = VersionHold(engine.load_weights, 60.0)
        running = asyncio.create_task(make_worker(replay, rows, engine=engine, hold=hold).run())
        version = 0
        while not running.done():
            version += 1
            await asyncio.to_thread(hold.load_weights, version, {})
        await running
        return replay.results

    results = asyncio.run(scenario())
    assert [result.failed for result in results] == [0] * 5
    assert len({result.policy_version for result in results}) > 1


def test_an_evaluation_has_no_deadline_while_no_load_waits_for_it():
    async def scenario():
        hold, loaded = VersionHold(lambda version, tensors: loaded.append(version), 0.05), []
        async with hold.held("rows 0 to 3"):
            await asyncio.sleep(0.3)
        await asyncio.to_thread(hold.load_weights, 1, {})
        assert loaded == [1]

    asyncio.run(scenario())


class HangingEngine(FakeEngine):
    async def generate(self, request):
        self.asked.set()
        await asyncio.Event().wait()


def test_an_evaluation_that_hangs_is_ended_by_name_by_the_load_that_waits_for_it(rows):
    async def scenario():
        engine, failures = HangingEngine(vocabulary=128), []
        engine.asked = asyncio.Event()
        engine.load_weights(0, {})
        hold = VersionHold(engine.load_weights, 0.05)

        def check() -> None:  # as the subscriber does
            for failure in failures:
                raise failure

        worker = make_worker(ScriptedReplay(0, [chunk(0, 3)]), rows, engine=engine, hold=hold, check=check)
        running = asyncio.create_task(worker.run())
        await engine.asked.wait()
        with pytest.raises(WeightsError) as failed:
            await asyncio.to_thread(hold.load_weights, 1, {})
        failures.append(failed.value)
        named = r"version 1 .* waited 0\.05 s .* for rows 0 to 2 of evaluation \w+ to end.*eval\.chunk"
        with pytest.raises(WeightsError, match=named):
            await running
        await asyncio.to_thread(hold.load_weights, 2, {})

    asyncio.run(scenario())


def test_an_evaluation_that_waits_too_long_for_a_load_says_so():
    async def scenario():
        begun, release = threading.Event(), threading.Event()

        def load(version, tensors):
            begun.set()
            assert release.wait(60)

        hold = VersionHold(load, 0.05)
        loading = asyncio.create_task(asyncio.to_thread(hold.load_weights, 1, {}))
        assert await asyncio.to_thread(begun.wait, 60)
        with pytest.raises(NoProgress, match=r"rows 0 to 3 waited .* weights being loaded"):
            async with hold.held("rows 0 to 3"):
                pytest.fail("entered during a load")
        release.set()
        await loading

    asyncio.run(scenario())


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
