"""The walks of `docs/architecture.md` against the imports of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WALK = re.compile(r"^ +`asyncrl/[^\n]+$", flags=re.MULTILINE)
LEG = re.compile(r"`([^`]+)` (→|◁|⇢) (?=`([^`]+)`)")


def legs() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    return [leg for line in WALK.findall(text) for leg in LEG.findall(line)]


def imported(file: str) -> set[str]:
    """Modules of asyncrl that `file` imports, as paths."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name.replace(".", "/") + ".py" for name in found}


def test_the_walks_have_legs_of_all_three_kinds() -> None:
    assert {kind for _, kind, _ in legs()} == {"→", "◁", "⇢"}
    assert len(legs()) > 40


@pytest.mark.parametrize(("start", "kind", "end"), legs())
def test_each_leg_of_the_walks_is_in_the_code(start: str, kind: str, end: str) -> None:
    if kind == "→":
        assert end in imported(start)
    elif kind == "◁":
        assert start in imported(end)
    else:
        verb, file = (end, start) if end.isidentifier() else (start, end)
        assert f'"{verb}"' in (ROOT / file).read_text(), f"{file} has no verb {verb}"
