"""`launchers/test.sh` in a small checkout of its own, where only the tests of the replay are real: its verdict."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coverage import CoverageData

from tests import conftest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = f"""#!/usr/bin/env bash
# Of the lanes only that of the replay is real, of the checks only the coverage; all that is started is written down.
echo "$*" >>"$SPOKEN"
case "$*" in
*"pytest "*tests/replay\\ tests/chaos* | "-m coverage "*) exec {sys.executable} -P "$@" ;;
esac
"""
COVERED = "def first():\n    return 1\n\n\ndef second():\n    return 2\n"
TESTS = """
import os

import pytest

from asyncrl.replay.covered import first, second


def test_whole():
    assert first() == 1


@pytest.mark.parametrize("place", range(int(os.environ["FAILING"])))
def test_beside(place, pytestconfig):
    if os.environ["ALONE"] == "dies":
        os._exit(1)
    assert pytestconfig.getoption("lf") and os.environ["ALONE"] == "passes"
    assert second() == 2
"""
NAMES = [f"tests/replay/test_covered.py::test_beside[{place}]" for place in range(6)]
FLAKY, FAILED = "== FLAKY: failed with others running, passed alone:", "== FAILED:"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']\n",
        "constraints.txt": "",
        "asyncrl/__init__.py": "",
        "asyncrl/replay/__init__.py": "",
        "asyncrl/replay/covered.py": COVERED,
        "asyncrl/losses/covered.py": "x = 1\n",
        "tests/replay/test_covered.py": TESTS,
        "tests/chaos/none.py": "",
        "tests/test_balance.py": "",
        ".venv/bin/python": PYTHON,
        ".venv/bin/lint-imports": "#!/bin/sh\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copytree(ROOT / "launchers", tmp_path / "launchers")
    data = CoverageData(basename=str(tmp_path / ".coverage.losses"))
    data.add_lines({str(tmp_path / "asyncrl/losses/covered.py"): [1]})
    data.write()
    return tmp_path


def script(checkout: Path, failing: int, alone: str, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Its exit status, what it said, and the commands of its Python."""
    given = {"FAILING": str(failing), "ALONE": alone, "SPOKEN": str(checkout / "spoken")}
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_cov.plugin"}
    done = subprocess.run(
        ["bash", str(checkout / "launchers" / "test.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(checkout), **given, **plugins},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout.splitlines(), (checkout / "spoken").read_text().splitlines()


def test_what_failed_beside_others_and_passes_alone_is_told_last_and_fails_nothing(checkout: Path) -> None:
    status, said, commands = script(checkout, 2, "passes")
    assert status == 0 and said[-3:] == [FLAKY, *NAMES[:2]], said
    lanes = [each for each in commands if "pytest" in each]
    again = next(place for place, each in enumerate(lanes) if "--lf" in each)
    assert not any("-m slow" in each for each in lanes[: again + 1]), "when nothing runs beside it"
    slow = [each.partition(" -m ")[2] for each in lanes[again + 1 :]]
    marks = ["not slow", "slow and not unhurried", "slow and unhurried"]
    assert [sum(each.startswith(mark) for each in slow) for mark in marks] == [1, 4, 4], "each portion in one lane"
    sums = [each.rpartition("not gpu ")[2] for each in lanes[:again] if "--ignore" not in each]
    assert len(sums) == len(set(sums)) == 6
    (others,) = (each for each in lanes[:again] if "--ignore" in each)
    portions = [path for each in sums for path in each.split() if not path.startswith("--")]
    assert {path for path in portions if f"--ignore={path}" not in others} == set()
    assert any("100%" in line for line in said if "asyncrl/replay/covered.py" in line), (
        "what the second run covers counts"
    )


@pytest.mark.parametrize(("failing", "alone"), [(2, "fails"), (6, "passes"), (1, "dies")])
def test_what_fails_again_or_with_many_or_ends_pytest_fails_the_script(
    checkout: Path, failing: int, alone: str
) -> None:
    status, said, commands = script(checkout, failing, alone)
    told = NAMES[:2] if alone == "fails" else ["pytest: replay ended with 1"]
    assert status == 1 and said[said.index(FAILED) + 1 :][: len(told)] == told and FLAKY not in said, said
    assert any("--lf" in each for each in commands) == (alone == "fails")
    assert not any("-m slow" in each for each in commands), "the longer half is left out"


def test_the_long_ones_can_be_chosen_from(checkout: Path) -> None:
    status, _, commands = script(checkout, 0, "passes", "--long", "tests/integration", "-x")
    assert status == 0
    assert [each for each in commands if "pytest" in each] == ["-m pytest -m long and not gpu tests/integration -x"]


def test_processes_of_the_fast_part_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"markexpr": "not slow", "numprocesses": None, "dist": "no", "usepdb": False}

    def asked(**more: object) -> Any:
        option = SimpleNamespace(**options)
        given = SimpleNamespace(option=option, args_source=pytest.Config.ArgsSource.TESTPATHS, **more)
        given.getoption = lambda name, default: getattr(option, name, default)
        conftest.pytest_cmdline_main(cast(pytest.Config, given))
        return option.numprocesses

    cores = len(os.sched_getaffinity(0))
    assert cores < asked() <= 2 * cores
    assert asked(workerinput={}) is None, "each of them would start as many, and those too"
