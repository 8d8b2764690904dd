"""`code`: scores the program in a completion by unit tests in a sandbox.

A program that fails a test, or does not end, is wrong; if the sandbox could not run it, the reward fails.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardError, SandboxError
from asyncrl.rewards.library.answers import ground_truth
from asyncrl.sandbox.limits import Limits, Outcome
from asyncrl.sandbox.running import chosen_level, run

FENCED = re.compile(r"```([\w+-]*)[^\n]*\n(.*?)```", re.DOTALL)
PYTHON = ("python", "python3", "py")
COLUMNS = ("tests", "test_cases", "test_list", "test")
"""Columns searched for tests, before the columns of any answer."""
UNREADABLE = (ValueError, RecursionError)
"""Errors of invalid JSON, or of endlessly nested lists."""

CALLER = """\
import json, sys
given = json.loads(sys.stdin.read())
import solution
owner = solution if hasattr(solution, given["name"]) else solution.Solution()
for arguments in given["calls"]:
    said = getattr(owner, given["name"])(*arguments)
    print("\\n" + given["mark"] + json.dumps(said, default=list), flush=True)
"""
"""Calls the program's function. It does not get the expected results, which are compared outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Tests of one row; of one or more of the three kinds."""

    typed: tuple[tuple[str, str], ...] = ()
    """(standard input, standard output)."""
    called: tuple[tuple[list[Any], Any], ...] = ()
    """(arguments, result) of `function`."""
    function: str = ""
    asserted: tuple[str, ...] = ()
    """Source that runs after the program, and passes if it raises nothing."""

    def __len__(self) -> int:
        return len(self.typed) + len(self.called) + len(self.asserted)


class Code:
    """`score` for a program that passes every test, else `wrong`; the part `passed` is the fraction of tests passed.

    Tests are in the row as in verl's and other data sets: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for a
    function; `[{"input": ..., "output": ...}]`; a list of `assert` lines or a source of them (`{"functional": ...}`),
    HumanEval's `test` with `entry_point`. Either as JSON text or as values. An `assert` runs beside the program that it
    tests, which could read it; expected outputs cannot be read.

    Args:
        partial: give `score` times the fraction of tests passed.
        isolation: `namespaces`, or on explicit request `rlimits`, which does not keep programs from your files and
            network.
        timeout_s, memory_mb: limits of each test.
        max_tests: number of a row's tests to use, from the first; 0 is all.

    Raises:
        ConfigError: this machine does not support the isolation. When called, RewardError: the row has no tests, or the
            sandbox failed.
    """

    def __init__(
        self,
        partial: bool = False,
        isolation: str = "namespaces",
        timeout_s: float = 6.0,
        memory_mb: int = 1024,
        max_tests: int = 0,
        score: float = 1.0,
        wrong: float = 0.0,
        column: str = "",
    ) -> None:
        self._level = chosen_level(isolation, "code", "reward.args.isolation")
        self._limits = Limits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s), memory_mb=memory_mb)
        self._partial, self._max_tests, self._column = partial, max_tests, column
        self._score, self._wrong = score, wrong

    async def __call__(self, completion: str, row: dict[str, Any]) -> dict[str, float]:
        tests = read_tests(row, self._column, self._max_tests)
        program = program_in(completion)
        passed = await self._passed(program, tests) if program else 0
        share = passed / len(tests)
        if self._partial:
            return {"score": self._wrong + (self._score - self._wrong) * share, "passed": share}
        return {"score": self._score if passed == len(tests) else self._wrong, "passed": share}

    async def _passed(self, program: str, tests: Tests) -> int:
        """Return how many tests pass; unless `partial`, stop after the first failure."""
        passed = await self._called(program, tests) if tests.called else 0
        if passed < len(tests.called) and not self._partial:
            return passed
        for stdin, wanted in tests.typed:
            outcome = await self._run(program, stdin)
            right = outcome.succeeded and same_text(outcome.stdout, wanted)
            if not right and not self._partial:
                return passed
            passed += right
        for source in tests.asserted:
            mark = secrets.token_hex(16)
            outcome = await self._run(f"{program}\n\n{source}\n\nprint('\\n{mark}')\n")
            right = outcome.succeeded and outcome.stdout.rstrip().endswith(mark)
            if not right and not self._partial:
                return passed
            passed += right
        return passed

    async def _called(self, program: str, tests: Tests) -> int:
        mark = secrets.token_hex(16)
        given = {"name": tests.function, "calls": [arguments for arguments, _ in tests.called], "mark": mark}
        outcome = await self._run(CALLER, json.dumps(given), {"solution.py": program})
        said = [line.removeprefix(mark) for line in outcome.stdout.splitlines() if line.startswith(mark)]
        pairs = zip(said, (wanted for _, wanted in tests.called), strict=False)
        return sum(same_result(text, wanted) for text, wanted in pairs)

    async def _run(self, program: str, stdin: str = "", files: dict[str, str] | None = None) -> Outcome:
        call = {"stdin": stdin, "limits": self._limits, "level": self._level, "files": files}
        try:
            return await asyncio.to_thread(run, program, **call)
        except SandboxError as error:
            raise RewardError(f"the sandbox could not run a program: {error}", "lost") from error


def program_in(completion: str) -> str:
    """Return the last fenced block of Python, or of no named language; the whole text if nothing is fenced."""
    blocks = FENCED.findall(completion)
    if not blocks:
        return "" if "```" in completion else completion.strip()
    named = [text for language, text in blocks if language.lower() in PYTHON]
    plain = [text for language, text in blocks if not language]
    return (named or plain or [""])[-1]


def read_tests(row: Mapping[str, Any], column: str, most: int) -> Tests:
    """Read the tests of a row. Raises RewardError: there are none, or none in a known form."""
    found = next((row[name] for name in COLUMNS if row.get(name)), None) if not column else None
    truth = found if found is not None else ground_truth(row, column, "code")
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except UNREADABLE:
            truth = {"functional": truth}
    try:
        tests = _tests(truth, row)
    except (KeyError, TypeError, *UNREADABLE) as error:
        raise RewardError(f"code cannot read the tests {truth!r:.120}: {type(error).__name__}: {error}") from error
    if not len(tests):
        raise RewardError(f"code found no test in {truth!r:.120}")
    last = most or None
    return Tests(
        typed=tests.typed[:last], called=tests.called[:last], function=tests.function, asserted=tests.asserted[:last]
    )


def _tests(truth: Any, row: Mapping[str, Any]) -> Tests:
    if isinstance(truth, Mapping) and "functional" in truth:
        entry = row.get("entry_point")
        call = f"\ncheck({entry})" if entry and "def check(" in truth["functional"] else ""
        return Tests(asserted=(truth["functional"] + call,))
    if isinstance(truth, Mapping):
        return _pairs(zip(truth["inputs"], truth["outputs"], strict=True), truth.get("fn_name") or "")
    if all(isinstance(entry, str) for entry in truth):
        setup = row.get("test_setup_code") or ""
        return Tests(asserted=tuple(f"{setup}\n{entry}" for entry in truth))
    name = next((entry["fn_name"] for entry in truth if entry.get("fn_name")), "")
    return _pairs(((entry["input"], entry["output"]) for entry in truth), name)


def _pairs(pairs: Any, function: str) -> Tests:
    if not function:
        return Tests(typed=tuple((_text(given), _text(wanted)) for given, wanted in pairs))
    return Tests(function=function, called=tuple((_arguments(given), _result(wanted)) for given, wanted in pairs))


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Arguments as a list, or as a text with one per line; each as JSON."""
    return [json.loads(line) for line in value.splitlines() if line.strip()] if isinstance(value, str) else list(value)


def _result(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except UNREADABLE:
        return value


def same_text(given: str, wanted: str) -> bool:
    """Whether the texts are equal except for white space at the ends of lines and of the whole."""
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in (given, wanted))
    return one == other


def same_result(said: str, wanted: Any) -> bool:
    """Whether the results are equal as JSON; numbers to nine digits. APPS wraps a result in a list of one, which is
    accepted too."""
    try:
        given = json.loads(said)
        return _equal(given, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _equal(given, wanted[0]))
    except (OverflowError, *UNREADABLE):  # OverflowError: a float compared with a too large integer
        return False


def _equal(given: Any, wanted: Any) -> bool:
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    if isinstance(given, float) and isinstance(wanted, int | float):
        return math.isclose(given, wanted, rel_tol=1e-9, abs_tol=1e-9)
    return type(given) is type(wanted) and given == wanted
