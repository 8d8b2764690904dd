"""The commands and options in `asyncrl --help` exist, and all existing ones are listed."""

from __future__ import annotations

import shlex

import pytest

from asyncrl.cli.arguments.parser import DESCRIPTIONS, EXAMPLES, GROUPS, parse, parser
from asyncrl.cli.main import COMMANDS, WAYS

NAMES = [name for of_it in GROUPS.values() for name in of_it]
LINES = [line for text in EXAMPLES.values() for line in text.replace("\\\n", " ").splitlines()]


def test_every_command_has_one_line_in_the_help_and_a_help_of_its_own() -> None:
    assert sorted(NAMES) == sorted({*COMMANDS, *WAYS, "data"}) == sorted(DESCRIPTIONS)
    text = parser().format_help()
    assert [name for name in NAMES if text.count(f"\n  {name} ") != 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_a_command_is_explained_in_lines_that_fit(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse([name, "--help"])
    text = capsys.readouterr().out
    assert DESCRIPTIONS[name] in " ".join(text.split())
    assert [line for line in text.splitlines() if len(line) > 120] == []
    bare = [line for line in text.splitlines() if line.startswith("  -") and len(line.split()) < 3]
    assert [line for line in bare if not text.split(line + "\n")[1].startswith("        ")] == []


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("asyncrl")])
def test_every_example_of_a_help_is_taken(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    assert parse(words[1:]).command == words[1]
