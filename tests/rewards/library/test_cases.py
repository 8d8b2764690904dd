"""Right and wrong answers as public data sets and completions write them: `cases/REWARD.jsonl`, one case per line.

To add a case, add a line: `truth` (the row's `answer`; null if the row has none), further columns `row`, the
`completion`, and `expected`: the score, or null if the reward must refuse the row. `args` are `reward.args`, `from`
says which data sets have it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checks.rewards import LIBRARY
from asyncrl.errors import RewardError
from asyncrl.sandbox.level import Level
from asyncrl.sandbox.running import unavailable
from asyncrl.user_code import load_function

CASES = {path.stem: path for path in sorted((Path(__file__).parent / "cases").glob("*.jsonl"))}
NEGATIVE = ("math_dapo",)
"""Rewards that give -1 for a wrong answer."""


def cases_of(reward: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES[reward].read_text().splitlines()]


def made(reward: str, args: dict[str, Any]) -> Any:
    function = load_function(LIBRARY[reward])
    if inspect.isclass(function):
        return function(**args)
    return lambda completion, row: function(completion, row, **args)


def given(reward: Any, case: dict[str, Any]) -> float | None:
    """Return the score; None for a refusal."""
    row = {"prompt": "p", **({} if case["truth"] is None else {"answer": case["truth"]}), **case.get("row", {})}
    try:
        returned = reward(case["completion"], row)
        returned = asyncio.run(returned) if inspect.isawaitable(returned) else returned
    except RewardError:
        return None
    return max(returned["score"] if isinstance(returned, dict) else returned, 0.0)


def wrong(reward: str, cases: list[dict[str, Any]], args: dict[str, Any], *, threads: int = 1) -> list[str]:
    function: dict[str, Any] = {}
    for case in cases:
        key = json.dumps(case.get("args", {}))
        function.setdefault(key, made(reward, args | case.get("args", {})))
    with ThreadPoolExecutor(threads) as pool:
        run = map if threads == 1 else pool.map
        scores = list(run(lambda case: given(function[json.dumps(case.get("args", {}))], case), cases))
    return [
        f"{case['from']}: {case['completion']!r} for {case['truth']!r} {case.get('row', '')}: {score}, not "
        f"{case['expected']}"
        for case, score in zip(cases, scores, strict=True)
        if score != pytest.approx(case["expected"])
    ]


@pytest.mark.parametrize("reward", [name for name in CASES if name != "code"])
def test_right_answers_score_and_wrong_ones_do_not(reward: str):
    assert wrong(reward, cases_of(reward), {"timeout_s": 60} if reward == "math" else {}) == []


@pytest.mark.slow
@pytest.mark.unhurried
def test_right_programs_score_and_wrong_ones_do_not():
    isolation = Level.RLIMITS if unavailable(Level.NAMESPACES) else Level.NAMESPACES
    args = {"isolation": isolation.value, "timeout_s": 60}
    assert wrong("code", cases_of("code"), args, threads=2) == []


def test_the_table_has_the_forms_of_public_data_sets():
    cases = {reward: cases_of(reward) for reward in CASES}
    assert cases.keys() == {"gsm8k", "math", "math_dapo", "exact_match", "choice", "f1", "qa_exact_match", "code"}
    assert sum(map(len, cases.values())) >= 400
    for reward, each in cases.items():
        scores = {case["expected"] for case in each}
        assert {0, 1} <= scores, reward
        seen = [json.dumps(case, sort_keys=True) for case in each]
        assert len(set(seen)) == len(seen), reward
