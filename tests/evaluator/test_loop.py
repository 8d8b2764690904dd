from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.errors import EngineDiedError, HopelessRewardError, NoProgress, RewardError
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluator import loop
from asyncrl.evaluator.loop import EvalPlan, Evaluator
from asyncrl.evaluator.run import FixedWeights
from asyncrl.quickstart.byte_tokenizer import EOS_ID
from asyncrl.rewards.score import RewardScore
from asyncrl.rollout.groups.episode import EpisodeRunner
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.types import Completion, SamplingParams
from tests.rollout.rollout_fakes import ByteTokenizer, encode_bytes, prompt_source, reward_length, rows_file
from tests.rollout.worker.test_worker import LateClock


class LateEngine(FakeEngine):
    """Row `n` of a `rows_file` waits `delays[n]` seconds first; for those in `dead`, for ever, and a minute of the
    evaluator's `clock` is a moment."""

    def __init__(self, delays: Sequence[float] = (), dead: Sequence[int] = (), clock: LateClock | None = None) -> None:
        super().__init__(vocabulary=128)
        self.delays, self.dead, self.clock = delays, dead, clock
        self.asked: list[int] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        row = int(bytes(request.prompt_ids.astype("uint8").tolist()).partition(b">")[0])
        self.asked.append(row)
        while row in self.dead:
            assert self.clock is not None
            self.clock.ahead_s += 60.0
            await asyncio.sleep(0.1)
        await asyncio.sleep(self.delays[row] if row < len(self.delays) else 0)
        return await super().generate(request)


@dataclass
class Kept:
    rows: dict[int, list[Sample]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def __call__(self, row: int, samples: Sequence[Sample]) -> None:
        assert row not in self.rows
        self.rows[row] = list(samples)
        self.order.append(row)


def evaluate(path: Path, rows: Sequence[int], kept: Kept, engine: FakeEngine | None = None, **changes: Any) -> None:
    engine = engine or FakeEngine(vocabulary=128)
    report = WorkerReport()
    report.add(engine.stats)
    runner = EpisodeRunner(
        engine=FixedWeights(engine),
        environment=SingleTurn(),
        decode=ByteTokenizer().decode,
        encode=encode_bytes,
        score=changes.pop("score", reward_length),
        stepped=lambda: report.count("environment_steps"),
    )
    settings = {"together": 4, "wait_timeout_s": 60.0, "max_failure_share": 1.0, "samples": 3, "seed": 5}
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(EOS_ID,))
    plan = EvalPlan(sampling=sampling, **{**settings, **changes})
    source = prompt_source(path)
    evaluator = Evaluator(runner, source, plan, progress=report.progress, keep=kept, say=lambda _: None)
    try:
        asyncio.run(evaluator.run(rows))
    finally:
        source.close()


def test_every_row_is_kept_with_all_its_samples_whatever_order_they_end_in(tmp_path: Path) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 6), Kept()
    evaluate(path, range(6), kept, LateEngine(delays=[0.3, 0.0, 0.1, 0.0, 0.0, 0.05]))
    assert sorted(kept.order) == list(range(6)) and kept.order != sorted(kept.order)
    for row, samples in kept.rows.items():
        assert [sample.sample for sample in samples] == [0, 1, 2]
        assert all(sample.reward == len(sample.completion) and sample.tokens > 0 for sample in samples)
        assert {sample.prompt for sample in samples} == {f"{row}>"}


def test_a_row_has_the_same_samples_alone_in_company_and_after_an_interruption(tmp_path: Path) -> None:
    path, whole, alone, other = rows_file(tmp_path / "r.jsonl", 5), Kept(), Kept(), Kept()
    evaluate(path, range(5), whole)
    evaluate(path, [3, 1], alone, together=1)
    evaluate(path, [3], other, seed=6)
    assert alone.rows == {row: whole.rows[row] for row in (1, 3)}
    assert other.rows[3] != whole.rows[3]
    assert whole.rows[3][0].completion != whole.rows[3][1].completion


def test_rows_without_a_reward_are_kept_with_their_reason_and_never_as_a_zero(tmp_path: Path) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 4, bad=(2,)), Kept()
    evaluate(path, range(4), kept)
    assert [sample.failed for sample in kept.rows[2]] == ["RewardError: row 2 is bad"] * 3
    assert all(sample.reward is None for sample in kept.rows[2])
    assert not any(sample.failed for row in (0, 1, 3) for sample in kept.rows[row])


def test_a_row_of_which_some_completions_fail_keeps_the_others(tmp_path: Path) -> None:
    async def score(texts: list[str], row: dict[str, Any], **_: Any) -> list[Any]:
        return [RewardScore(value=1.0), RewardError("the second is bad"), RewardScore(value=0.0)]

    path, kept = rows_file(tmp_path / "r.jsonl", 1), Kept()
    evaluate(path, [0], kept, score=score)
    assert [(s.sample, s.reward, s.failed) for s in kept.rows[0]] == [
        (0, 1.0, ""), (1, 0.0, ""), (2, None, "RewardError: the second is bad")
    ]  # fmt: skip


def test_a_row_that_cannot_be_used_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 3), Kept()
    path.write_text(path.read_text().replace('"1>"', f'"{"x" * 40}"'))
    evaluate(path, range(3), kept)
    assert f"{path}:2: the prompt has 40 tokens" in kept.rows[1][0].failed
    assert kept.rows[0][0].reward is not None and kept.rows[2][0].reward is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LateClock:
    made = LateClock()
    monkeypatch.setattr(loop, "time", made)
    return made


def test_rows_that_stay_silent_are_given_up_and_the_others_are_evaluated(tmp_path: Path, clock: LateClock) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 6), Kept()
    evaluate(path, range(6), kept, LateEngine(dead=(0, 1), clock=clock), together=2, wait_timeout_s=100.0)
    assert all("no token and no environment step" in sample.failed for row in (0, 1) for sample in kept.rows[row])
    assert all(sample.reward is not None for row in (2, 3, 4, 5) for sample in kept.rows[row])


def test_an_engine_that_stays_silent_for_the_next_rows_too_ends_it(tmp_path: Path, clock: LateClock) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 8), Kept()
    with pytest.raises(NoProgress, match=r"2 rows are open.*The rows given up before ended the same way"):
        evaluate(path, range(8), kept, LateEngine(dead=range(8), clock=clock), together=2, wait_timeout_s=100.0)
    assert sorted(kept.rows) == [0, 1]


def test_a_reward_that_fails_for_most_completions_ends_it_with_the_reason(tmp_path: Path) -> None:
    path, kept = rows_file(tmp_path / "r.jsonl", 90, bad=tuple(range(90))), Kept()
    with pytest.raises(HopelessRewardError, match=r"for 102 of the last 102 completions.*row \d+ is bad\. Fix"):
        evaluate(path, range(90), kept, max_failure_share=0.5)
    assert len(kept.rows) < 90


def test_an_engine_that_died_ends_it_at_once(tmp_path: Path) -> None:
    class DeadEngine(FakeEngine):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            raise EngineDiedError("its process is gone")

    with pytest.raises(EngineDiedError, match="is gone"):
        evaluate(rows_file(tmp_path / "r.jsonl", 3), range(3), Kept(), DeadEngine())
