"""No import circles of any length, including imports for types, which import-linter ignores."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imports(package: Path) -> dict[str, set[str]]:
    """Module -> modules of the same package that it names in an import, wherever in the file that stands."""
    files: dict[str, Path] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {module: _named(module, file, set(files)) - {module} for module, file in files.items()}


def _named(module: str, file: Path, modules: set[str]) -> set[str]:
    found: set[str] = set()
    within = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = within[: len(within) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` names the module, `from module import name` the module before it.
            found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return found & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One, if there is any: each imports the next, and the last is the first."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_file_of_the_package_knows_one_that_knows_it() -> None:
    graph = imports(ROOT / "asyncrl")
    assert len(graph) > 250
    assert "asyncrl.settings.loss.rules" in graph["asyncrl.settings.loss.meaning"], "imports are seen"
    assert circle(graph) == []


@pytest.mark.parametrize(
    "line", ["from p.a import A", "import p.a", "from p import a", "from . import a", "from .a import A"]
)
def test_a_circle_would_be_found_however_it_is_written(line: str, tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from p.b import B\n")
    (package / "b.py").write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}\n")
    assert sorted(set(circle(imports(package)))) == ["p.a", "p.b"]
