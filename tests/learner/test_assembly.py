"""The learner's parts are made in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import asyncrl.learner

PARTS = {"Checkpoints", "Training", "build_roles", "begin", "joined_ranks"}


def test_only_the_composition_root_makes_the_parts_of_the_learner() -> None:
    made: dict[str, set[str]] = {}
    learner = Path(asyncrl.learner.__path__[0])
    for file in learner.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PARTS:
                made.setdefault(node.func.id, set()).add(str(file.relative_to(learner)))
    assert made.pop("joined_ranks") == {"__main__.py"}
    assert made == {part: {"assembly.py"} for part in PARTS - {"joined_ranks"}}
