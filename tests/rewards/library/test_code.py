from __future__ import annotations

import asyncio
import json

import pytest

from asyncrl.errors import ConfigError, RewardError, SandboxError
from asyncrl.rewards.library import code
from asyncrl.rewards.library.code import Code, program_in
from asyncrl.rewards.library.code_results import same_result, same_text
from asyncrl.rewards.library.code_tests import read_tests
from asyncrl.sandbox import running
from asyncrl.sandbox.level import Level
from asyncrl.sandbox.running import unavailable

ADDS = "print(sum(map(int, input().split())))"
STDIO = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}


@pytest.fixture
def isolation() -> str:
    return Level.RLIMITS.value if unavailable(Level.NAMESPACES) else Level.NAMESPACES.value


def judged(truth, **columns) -> dict:
    return {"prompt": "p", "reward_model": {"ground_truth": truth}, **columns}


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```py\na\n```\nthen\n```python\nb\n```\nso", "b\n"),
        ("```\na\n```", "a\n"),
        ("```text\nb\n```\n```\na\n```", "a\n"),
        ("```bash\nls\n```", ""),
        ("```python\nnever closed", ""),
        ("print(1)", "print(1)"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(completion, program):
    assert program_in(completion) == program


def test_tests_are_read_in_the_forms_that_data_sets_have():
    typed = (("1 2\n", "3\n"), ("3 4", "7"))
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4", "output": "7"}]
    calls = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, "7"]}
    humaneval = {"prompt": "p", "test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}

    assert read_tests(judged(json.dumps(STDIO)), "", 0).typed == typed
    assert read_tests({"prompt": "p", "test_cases": pairs}, "", 0).typed == typed
    assert read_tests({"prompt": "p", "mine": STDIO}, "mine", 1).typed == typed[:1]
    assert read_tests(judged(calls), "", 0).called == (([1, 2], 3), ([3, 4], 7))
    assert read_tests({"prompt": "p", "test_list": ["assert f(1) == 2"]}, "", 0).asserted == ("\nassert f(1) == 2",)
    assert read_tests(judged({"functional": "assert f(1)"}), "", 0).asserted == ("assert f(1)",)
    assert read_tests(humaneval, "", 0).asserted[0].endswith("\ncheck(f)")


ENDLESS = [{"input": "[" * 100_000, "output": "1", "fn_name": "f"}]


@pytest.mark.parametrize("truth", [{"inputs": ["1"]}, {"inputs": [], "outputs": []}, [], [{"input": "1"}], ENDLESS, 7])
def test_a_row_without_tests_is_a_failure_and_no_zero(truth):
    with pytest.raises(RewardError, match=r"code (cannot read|found no)"):
        read_tests(judged(truth), "", 0)


def test_outputs_are_compared_but_for_white_space_at_ends_and_results_as_json():
    assert same_text("1 \n2\n\n", "\n1\n2")
    assert not same_text("1 2", "1  2") and not same_text("", "1")
    assert same_result("[1, 2]", [1, 2]) and same_result("0.30000000000000004", 0.3) and same_result("3", [3])
    assert not same_result("true", 1) and not same_result("1", "1") and not same_result("nonsense", 1)
    assert not same_result("1.0", 10**400) and not same_result("[" * 100_000, [1])


def score(reward: Code, program: str, row: dict) -> dict[str, float]:
    return asyncio.run(reward(f"```python\n{program}\n```", row))


@pytest.mark.slow
@pytest.mark.unhurried
def test_programs_are_judged_by_their_tests(isolation):
    every, some = Code(isolation=isolation, timeout_s=60), Code(isolation=isolation, timeout_s=60, partial=True)
    calls = judged({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]})
    asserts = {"prompt": "p", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]}
    adds = "def add(a, b): return a + b"

    assert score(every, ADDS, judged(STDIO)) == {"score": 1.0, "passed": 1.0}
    assert score(some, "print(3)", judged(STDIO)) == {"score": 0.5, "passed": 0.5}
    assert score(some, f"class Solution:\n  {adds.replace('(a', '(self, a')}", calls) == {"score": 0.5, "passed": 0.5}
    assert score(every, adds, calls)["score"] == 0.0
    assert score(some, adds, asserts) == {"score": 0.5, "passed": 0.5}
    assert asyncio.run(every("I do not know", judged(STDIO))) == {"score": 0.0, "passed": 0.0}


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "while True: pass",
        "def add(a, b): return float('nan')",
        "class Same:\n  def __eq__(self, other): return True\ndef add(a, b): return Same()",
        "import json; json.dumps = lambda *a, **k: '3'\ndef add(a, b): return 0",
    ],
)
def test_a_program_that_ends_early_or_cheats_passes_nothing(isolation, program):
    """Its function's results are compared outside, where it is not."""
    row = judged({"fn_name": "add", "inputs": [[1, 2], [3, 5]], "outputs": [3, 8]})

    assert score(Code(isolation=isolation, timeout_s=2), program, row)["score"] == 0.0


def test_a_sandbox_that_fails_is_a_failure_and_no_zero(monkeypatch, isolation):
    def broken(*_, **__):
        raise SandboxError("the kernel says no")

    reward = Code(isolation=isolation)
    monkeypatch.setattr(code, "run", broken)
    with pytest.raises(RewardError, match="the kernel says no") as failed:
        score(reward, ADDS, judged(STDIO))
    assert failed.value.reason == "lost"


def test_a_machine_without_namespaces_is_refused_until_less_is_named(monkeypatch):
    monkeypatch.setattr(running, "unavailable", lambda level: "unshare: no" if level is Level.NAMESPACES else "")

    with pytest.raises(ConfigError, match=r"unshare: no\. Allow user namespaces .*reward\.args\.isolation=rlimits"):
        Code()
    Code(isolation="rlimits")
    with pytest.raises(ConfigError, match="must be namespaces or rlimits; got 'none'"):
        Code(isolation="none")
