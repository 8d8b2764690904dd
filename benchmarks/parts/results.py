"""Make RESULTS.md from the kept lines: what was measured, on which machine, when, and at which commit."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parts.answer import ROOT

FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
HEAD = """# What has been measured

Made by `python -m benchmarks` from the lines in `benchmarks/results/`: change those, not this page. Each is what a
command printed; the newest of a command stands here. Times on a machine that others use say little beside those of
another one; ratios of what was measured side by side say more.
"""


@dataclass(frozen=True)
class Record:
    """One kept line. Its keys are the names of these fields; `load` is the machine's load before the run, if noted."""

    benchmark: str
    """Module that was run, or command, such as `benchmarks.replay`, `tests.chaos.run`, `asyncrl quickstart`."""
    command: str
    date: str
    commit: str
    machine: str
    result: dict[str, Any]
    note: str = ""
    load: float | None = None


def read(folder: Path = FOLDER) -> list[Record]:
    """Read all lines of all files, in the order of the file names.

    Raises:
        ValueError: a line is not a record, or is of a `--smoke` run. The message has its file and number.
    """
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            values = json.loads(line)
            if values.pop("smoke", False):
                raise ValueError(f"{path}:{number} is a --smoke run, which measures nothing: delete it")
            try:
                records.append(Record(**values))
            except TypeError as error:
                raise ValueError(f"{path}:{number} is no record of a benchmark: {error}") from None
    return records


def newest(records: list[Record]) -> list[Record]:
    """Return the newest record of each command. Commands are in the order of their first record."""
    found: dict[str, Record] = {}
    for record in records:
        if record.command not in found or record.date >= found[record.command].date:
            found[record.command] = record
    return list(found.values())


def figure(records: list[Record], path: str) -> Any:
    """Return the value at a path such as `benchmarks.quickstart/runs/0/seconds_to_95`: the module, then keys and
    indices in its result. The first command of that module that has such a value gives it.

    Raises:
        KeyError: none of the newest records has such a value.
    """
    module, *keys = path.split("/")
    for record in newest(records):
        value: Any = record.result
        try:
            for key in keys:
                value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError):
            continue
        if record.benchmark == module:
            return value
    raise KeyError(f"{path}: none of the newest lines has it")


def page(records: list[Record]) -> str:
    """Return the text of RESULTS.md."""
    parts = [HEAD]
    latest = newest(records)
    for module in dict.fromkeys(record.benchmark for record in latest):
        parts.append(f"\n## {module}\n{question(module)}")
        for record in latest:
            if record.benchmark == module:
                parts.append(section(record))
    return "".join(parts)


def question(module: str) -> str:
    """Return the first paragraph of the module's docstring; empty for a command."""
    file = ROOT / f"{module.replace('.', '/')}.py"
    said = (ast.get_docstring(ast.parse(file.read_text())) or "") if file.exists() else ""
    words = said.partition("\n\n")[0].split()
    return f"\n{' '.join(words)}\n" if words else ""


def section(record: Record) -> str:
    load = "" if record.load is None else f", load {record.load}"
    lines = [f"`{record.command}`  ", f"{record.date}, commit {record.commit}, {record.machine}{load}.", ""]
    if record.note:
        lines[1] += f" {record.note}"
    return "\n" + "\n".join([*lines, *tables(record.result)]) + "\n"


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of the plain values, and of one table for each value that has rows of its own."""
    plain = {name: value for name, value in result.items() if not has_rows(value)}
    if plain:
        yield from table(["", ""], [[name, shown(value)] for name, value in plain.items()])
    for name, value in result.items():
        if has_rows(value):
            yield from ("", f"{name}:", "") if plain or len(result) > 1 else ()
            rows = value if isinstance(value, dict) else {str(place): row for place, row in enumerate(value)}
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            cells = [[key, *(shown(row.get(column, "")) for column in columns)] for key, row in rows.items()]
            yield from table(["", *columns], cells)


def has_rows(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(parts) and all(isinstance(part, dict) for part in parts)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else "" if value is None else str(value)
