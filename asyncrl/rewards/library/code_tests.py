"""Reads the unit tests of a row, in the forms that public data sets have."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.library.answers import ground_truth

COLUMNS = ("tests", "test_cases", "test_list", "test", "input_output", "verification_info")
"""Columns searched for tests, before the columns of any answer."""
NESTED = ("test_cases", "tests", "test_list", "assert_case")
"""Entries of a mapping that contain its tests."""
UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError)
"""Errors of invalid JSON or Python, or of endlessly nested lists."""
LONGEST = 4000
"""Digits of an integer that Python reads without asking; longer ones are read as exact decimals."""
TEST_CASES = """
import unittest as _unittest
_tests = [
    _unittest.defaultTestLoader.loadTestsFromTestCase(each)
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, _unittest.TestCase)
]
assert _unittest.TextTestRunner().run(_unittest.TestSuite(_tests)).wasSuccessful()
"""
NOTHING_RUNS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """Tests of one row; of one or more of the three kinds."""

    typed: tuple[tuple[str, str], ...] = ()
    """(standard input, standard output)."""
    called: tuple[tuple[list[Any], Any], ...] = ()
    """(arguments, result) of `function`."""
    texts: tuple[str | None, ...] = ()
    """For each of `called`, the result as the row has it, if it is text: `7` may be a number or a text."""
    function: str = ""
    """The function that the tests call; empty if not known."""
    asserted: tuple[str, ...] = ()
    """Source that runs after the program, and passes if it raises nothing."""
    before: str = ""
    """Source of the prompt that the program continues or repeats (HumanEval's)."""

    def __len__(self) -> int:
        return len(self.typed) + len(self.called) + len(self.asserted)


def read_tests(row: Mapping[str, Any], column: str, most: int) -> Tests:
    """Read the tests of a row; at most `most` of each kind, 0 for all.

    Raises:
        RewardError: there are none, none in a known form, or such that any program would pass.
    """
    found = next((row[name] for name in COLUMNS if row.get(name)), None) if not column else None
    truth = found if found is not None else ground_truth(row, column, "code")
    if isinstance(truth, str):
        try:
            truth = loads(truth)
        except UNREADABLE:
            truth = {"functional": truth}
    try:
        tests = _tests(truth, row)
    except (KeyError, TypeError, AttributeError, *UNREADABLE) as error:
        raise RewardError(f"code cannot read the tests {truth!r:.120}: {type(error).__name__}: {error}") from error
    if not len(tests):
        raise RewardError(f"code found no test in {truth!r:.120}")
    last = most or None
    return replace(
        tests,
        typed=tests.typed[:last],
        called=tests.called[:last],
        texts=tests.texts[:last],
        asserted=tests.asserted[:last],
    )


def loads(text: str) -> Any:
    """Read JSON with integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST else Decimal(digits))


def _tests(truth: Any, row: Mapping[str, Any]) -> Tests:
    if isinstance(truth, Mapping) and "functional" in truth:
        return _functional(truth["functional"], row)
    if isinstance(truth, Mapping):
        name = _name_in(truth, row)
        for plural, singular in (("inputs", "outputs"), ("input", "output")):
            if plural in truth:
                return _pairs(zip(truth[plural], truth[singular], strict=True), name)
        return _tests(next(truth[key] for key in NESTED if truth.get(key)), row)
    if not isinstance(truth, list | tuple):
        raise TypeError(f"expected a mapping or a list, got {type(truth).__name__}")
    if all(isinstance(entry, str) for entry in truth):
        setup = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""])
        trees = [ast.parse(entry) for entry in truth]
        return Tests(asserted=tuple(f"{setup}\n{entry}" for entry in truth), function=_called_in(trees))
    name = next((found for entry in truth if (found := _name_in(entry, row))), "")
    if not name and any(entry.get("testtype", entry.get("type")) in ("functional", "function_call") for entry in truth):
        raise ValueError("the tests call a function, and `fn_name` does not say which")
    outputs = (entry["output"] if "output" in entry else entry["expected_output"] for entry in truth)
    return _pairs(zip((entry["input"] for entry in truth), outputs, strict=True), name)


def _name_in(entry: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the name of the function to call: of APPS, TACO and verl, or of LiveCodeBench and its kin."""
    for metadata in (entry, entry.get("metadata"), row.get("metadata")):
        if isinstance(metadata, str) and metadata.startswith("{"):
            metadata = json.loads(metadata)
        if isinstance(metadata, Mapping) and (name := metadata.get("fn_name") or metadata.get("func_name")):
            return str(name)
    return ""


def _functional(source: str, row: Mapping[str, Any]) -> Tests:
    """Tests as source: asserts, HumanEval's `check(candidate)`, functions `test_...`, or classes of unittest."""
    tree = ast.parse(source)
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    entry = str(row.get("entry_point") or "")
    calls = ""
    if "check" in functions and entry:
        calls = f"\ncheck({entry})"
    elif wanting := [name for name, each in functions.items() if name.startswith("test") and _required(each)]:
        raise ValueError(f"{wanting[0]} needs arguments (fixtures are not supported)")
    elif tests := [name for name in functions if name.startswith("test")]:
        calls = "".join(f"\n{name}()" for name in tests)
    if any(isinstance(each, ast.ClassDef) and "TestCase" in ast.dump(each) for each in tree.body):
        source, calls = f'__name__ = "tests"\n{source}', calls + TEST_CASES
    if not calls and not any(_runs(each) for each in tree.body):
        raise ValueError("nothing in them runs, so that any program would pass; check() needs the column entry_point")
    prompt = row.get("prompt")
    before = prompt if entry and isinstance(prompt, str) and f"def {entry}(" in prompt and _parses(prompt) else ""
    return Tests(asserted=(source + calls,), function=entry or _called_in([tree]), before=before)


def _runs(statement: ast.stmt) -> bool:
    if isinstance(statement, NOTHING_RUNS):
        return False
    return any(isinstance(each, ast.Call | ast.Assert | ast.Raise) for each in ast.walk(statement))


def _required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return len(function.args.posonlyargs + function.args.args) > len(function.args.defaults)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except UNREADABLE:
        return False
    return True


def _called_in(trees: Iterable[ast.AST]) -> str:
    """Return the first function that the sources call by name, and neither define nor find in Python."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name not in own and not hasattr(builtins, name):
                return name
    return ""


def _pairs(pairs: Iterable[tuple[Any, Any]], function: str) -> Tests:
    if not function:
        return Tests(typed=tuple((_text(given), _text(wanted)) for given, wanted in pairs))
    several = list(pairs)
    return Tests(
        function=function,
        called=tuple((_arguments(given), _result(wanted)) for given, wanted in several),
        texts=tuple(wanted if isinstance(wanted, str) else None for _, wanted in several),
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Arguments as a list, or as a text with one per line; each as JSON, or as Python writes it."""
    if not isinstance(value, str):
        return list(value)
    return [_literal(line) for line in value.splitlines() if line.strip()]


def _result(value: Any) -> Any:
    try:
        return _literal(value) if isinstance(value, str) else value
    except UNREADABLE:
        return value


def _literal(text: str) -> Any:
    try:
        return loads(text)
    except UNREADABLE:
        return ast.literal_eval(text.strip())
