"""`code`: scores the program in a completion by unit tests in a sandbox.

A program that fails a test, or does not end, is wrong; if the sandbox could not run it, the reward fails.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import textwrap
from typing import Any

from asyncrl.errors import RewardError, SandboxError
from asyncrl.rewards.library.code_results import same_result, same_text
from asyncrl.rewards.library.code_tests import Tests, read_tests
from asyncrl.sandbox.limits import Limits, Outcome
from asyncrl.sandbox.running import chosen_level, run

FENCED = re.compile(
    r"^(?P<indent>[ \t>]*)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+-]*)[^\n`]*\n"
    r"(?P<code>.*?)^[ \t>]*(?P=fence)",
    re.DOTALL | re.MULTILINE,
)
INLINE = re.compile(r"(?P<indent>)```(?P<language>[\w+-]*)[^\n`]*\n(?P<code>.*?)```", re.DOTALL)
"""A block that begins or ends within a line."""
FENCE = re.compile(r"^[ \t>]*(?:```|~~~)", re.MULTILINE)
PYTHON = ("python", "python3", "py", "py3", "ipython", "pypy", "pypy3")
FUTURE = re.compile(r"^from __future__ import [^\n(]+\n", re.MULTILINE)

PRELUDE = """\
import builtins, importlib
def known(names, modules):
    for name in modules:
        module = importlib.import_module(name)
        found = {each: getattr(module, each) for each in getattr(module, "__all__", dir(module)) if each[0] != "_"}
        for each, value in found.items():
            if not hasattr(builtins, each):
                setattr(builtins, each, value)
    for name in names:
        setattr(builtins, name, importlib.import_module(name))
known(("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "random", "re", "string", "sys",
       "typing"), ("typing", "collections"))
"""
"""Names that programs use without importing them, because sites of exercises provide them; a name of the program's own
goes before. Not the functions of modules: an assert for a function that the program lacks would find `math.gcd`."""
CALLER = """\
import prelude
prelude.known((), ("heapq", "bisect", "itertools", "functools", "math", "string"))
import json, sys
given = json.loads(sys.stdin.read())
import solution
def plain(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key) if isinstance(key, tuple) else key: plain(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return {"\\0set": [plain(one) for one in value]}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(one) for one in value] if hasattr(value, "__iter__") else float(value)
for arguments in given["calls"]:
    try:
        owner = solution if hasattr(solution, given["name"]) else solution.Solution()
        said = json.dumps(plain(getattr(owner, given["name"])(*arguments)))
    except Exception:
        said = "raised"
    print("\\n" + given["mark"] + said, flush=True)
"""
"""Calls the program's function. It does not get the expected results, which are compared outside."""
LIBRARY = 'import prelude, sys; sys.modules["solution"] = sys.modules["__main__"]; __name__ = "solution"\n'
"""Before a program whose functions are tested: it must not read input under `if __name__ == "__main__"`."""


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
        program = program_in(completion, tests.function)
        if tests.before:
            program = continued(tests.before, program, completion, tests.function)
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
            outcome = await self._run(prepared(program, "import prelude\n"), stdin)
            right = outcome.succeeded and same_text(outcome.stdout, wanted)
            if not right and not self._partial:
                return passed
            passed += right
        for source in tests.asserted:
            mark = secrets.token_hex(16)
            tested = f'{prepared(program, LIBRARY)}\n\n__name__ = "__main__"\n{source}\n\nprint("\\n{mark}")\n'
            outcome = await self._run(tested)
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
        wanted = zip((result for _, result in tests.called), tests.texts, strict=True)
        return sum(same_result(text, *result) for text, result in zip(said, wanted, strict=False))

    async def _run(self, program: str, stdin: str = "", files: dict[str, str] | None = None) -> Outcome:
        files = {"prelude.py": PRELUDE, **(files or {})}
        call = {"stdin": stdin, "limits": self._limits, "level": self._level, "files": files}
        try:
            return await asyncio.to_thread(run, program, **call)
        except SandboxError as error:
            raise RewardError(f"the sandbox could not run a program: {error}", "lost") from error


def program_in(completion: str, function: str = "") -> str:
    """Return the last fenced block of Python, or of no named language; of several the last that defines `function`, if
    one does, since examples of its use may follow. The whole text if nothing is fenced."""
    text = completion.replace("\r\n", "\n")
    found = list(FENCED.finditer(text)) or INLINE.finditer(text)
    blocks = [(each["language"], _unindented(each["code"], each["indent"])) for each in found]
    if not blocks:
        return "" if FENCE.search(text) or "```" in text else text.strip()
    named = [code for language, code in blocks if language.lower() in PYTHON]
    plain = [code for language, code in blocks if not language]
    programs = named or plain or [""]
    if function:
        definition = re.compile(rf"^\s*(?:(?:async\s+)?def|class)\s+(?:{re.escape(function)}|Solution)\b", re.MULTILINE)
        programs = [code for code in programs if definition.search(code)] or programs
    return programs[-1]


def _unindented(code: str, indent: str) -> str:
    """Remove the indentation or the quotation marks of a fence from its lines."""
    if not indent:
        return code
    if ">" in indent:
        code = re.sub(r"^[ \t]*> ?", "", code, flags=re.MULTILINE)
    return textwrap.dedent(code)


def continued(before: str, program: str, completion: str, function: str) -> str:
    """Return a program after the source that its prompt began: as the body of the function, unless it defines it."""
    if not program:
        return ""
    if re.search(rf"^(?:async\s+)?def\s+{re.escape(function)}\b", program, re.MULTILINE):
        return f"{before}\n\n{program}"
    body = program if FENCE.search(completion) else completion.replace("\r\n", "\n")
    if not re.match(r"\s*\n?[ \t]", body):
        body = textwrap.indent(body, "    ")
    return f"{before.rstrip()}\n{body}"


def prepared(program: str, first: str) -> str:
    """Return the program behind a first line; imports from `__future__` stay before it."""
    return "".join(FUTURE.findall(program)) + first + FUTURE.sub("", program)
