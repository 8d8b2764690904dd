"""Sets of `eval.sets` in a worker: own rows, sampling, environment and rewards; what is equal is shared."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.chat.renderer import RendererChat
from asyncrl.checks.evaluations import eval_sets
from asyncrl.config import load_config
from asyncrl.engines.fake import FakeEngine
from asyncrl.environments.single_turn import SingleTurn
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.rewards.score import Outcome, RewardScore
from asyncrl.rollout.groups.evaluated import MOST_SOURCES, told_apart
from asyncrl.rollout.worker import wiring
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.schema import Config
from tests.rollout.rollout_fakes import SAMPLING, ByteTokenizer, prompt_source, rows_file

ENVIRONMENT = """
from dataclasses import replace

from asyncrl.environments.single_turn import SingleTurn


class Quiet(SingleTurn):
    async def run(self, prompt, size, tools):
        async def score(texts, row, **given):
            return await tools.score([""] * len(texts), row, **given)

        return await super().run(prompt, size, replace(tools, score=score))
"""


class Tokenizer(ByteTokenizer):
    end_texts: tuple[str, ...] = ()

    def decode(self, sequences: Any, *, special: bool = True, skip_special_tokens: bool = False) -> Any:
        return self._tokenizer.decode(sequences, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(token) for token in ids]


class Constant:
    """Rewards that give one number, and nothing for an empty text."""

    def __init__(self, value: float) -> None:
        self.value = value

    async def __aenter__(self) -> Constant:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def score(self, completions: list[str], row: dict[str, Any], **_: Any) -> list[Outcome]:
        return [RewardScore(value=self.value if text else 0.0) for text in completions]

    def stats(self) -> dict[str, float]:
        return {}


def test_each_set_has_its_own_and_shares_what_is_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "rows.jsonl", 6)
    Path("few.jsonl").write_text(json.dumps({"prompt": "one and only"}) + "\n")
    Path("quiet.py").write_text(ENVIRONMENT)
    sources = ("openai/gsm8k", "math", "math", "")
    Path("mixed.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}>", "data_source": each}) + "\n" for n, each in enumerate(sources))
    )
    config = load_config(
        [
            *("model.path=m", "data.path=rows.jsonl", "reward=exact_match", "eval.path=rows.jsonl"),
            *("eval.sets.few=few.jsonl", "eval.sets.own.path=rows.jsonl", "eval.sets.own.reward=f1"),
            *("eval.sets.alike.path=rows.jsonl", "eval.sets.alike.reward=f1", "eval.sets.alike.samples=3"),
            *("eval.sets.alike.temperature=1", "eval.sets.quiet.path=rows.jsonl"),
            *("eval.sets.quiet.environment=quiet.py:Quiet", "eval.sets.mixed=mixed.jsonl"),
        ]
    )
    config.telemetry.samples_per_evaluation = 2
    made: list[str] = []

    def make_rewards(_: Config, *, of_set: str) -> Constant:
        made.append(of_set)
        return Constant(0.25)

    monkeypatch.setattr(wiring, "make_rewards", make_rewards)
    tokenizer = Tokenizer()
    texts = wiring.Texts(
        tokenizer=tokenizer,
        chat=cast(RendererChat, tokenizer),
        vocabulary=264,
        prompts=prompt_source(tmp_path / "rows.jsonl"),
        sampling=SAMPLING,
    )

    async def scenario() -> dict[str, EvalResult]:
        engine, report = FakeEngine(vocabulary=128), WorkerReport()
        engine.load_weights(0, {})
        known = [wiring.Scoring(config.environment, config.reward, SingleTurn(), Constant(1.0))]
        results = {}
        async with contextlib.AsyncExitStack() as stack:
            for each in eval_sets(config):
                evaluate = await wiring.evaluation_of(each, texts, engine, known, stack, report)
                order = EvalAssignment(job_id=0, chunk=0, attempt=0, eval_set=each.name, start=0, stop=4)
                results[each.name] = await evaluate(order)
            await engine.close()
        return results

    results, prompts = asyncio.run(scenario()), prompt_source(tmp_path / "rows.jsonl")
    assert made == ["own"]
    assert results["heldout"].scores == (1.0,) * 4
    assert (results["few"].scores, results["few"].missing) == ((1.0,), 3)
    assert results["own"].scores == results["alike"].scores == (0.25,) * 4
    assert results["alike"].figures["pass@2"] == (0.0,) * 4
    assert results["quiet"].scores == (0.0,) * 4
    assert results["heldout"].figures == {}, "all are of one source"
    kept = [(one.row, one.prompt, one.reward, one.version_max) for one in results["heldout"].samples]
    assert kept == [(0, prompts[0].text, 1.0, 0), (3, prompts[3].text, 1.0, 0)], "two of six rows"
    assert [(one.row, one.reward, one.failed) for one in results["few"].samples] == [(0, 1.0, "")]
    assert results["mixed"].figures == {
        "openai_gsm8k/mean": (1.0, None, None, None),
        "math/mean": (None, 1.0, 1.0, None),
    }


def test_sources_are_told_apart_where_there_are_several_and_not_too_many() -> None:
    assert told_apart(["a", "b", "b"], 0) == ("a", "b", "b")
    assert told_apart(["a", "a", "b"], 2) == told_apart([], 0) == ()
    assert told_apart(map(str, range(MOST_SOURCES + 1)), 0) == ()
    assert told_apart(["数学", "代码", "a/b", "a b", "", "数学"], 0) == ("数学", "代码", "a_b", "a_b_", "", "数学")
    assert len(told_apart(map(str, range(10**9)), MOST_SOURCES)) == MOST_SOURCES
