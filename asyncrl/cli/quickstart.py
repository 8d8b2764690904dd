"""`asyncrl quickstart [key=value ...]`: learns a task with the whole system, on two CPU cores.

Runs `asyncrl local experiment=quickstart` with the paths of what `asyncrl.quickstart` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.cli.local import run_local
from asyncrl.collector import load
from asyncrl.quickstart.prepare import prepared, quickstart_overrides
from asyncrl.telemetry.reports.summary import QUICKSTART


def main(overrides: Sequence[str]) -> int:
    folder = prepared(overrides)
    return run_local(quickstart_overrides(folder, overrides), typed=[*command_of(sys.argv[0]), *overrides])


def command_of(program: str) -> tuple[str, str]:
    """What was typed: the command itself, or the launcher, which calls it as a module."""
    launcher, command = QUICKSTART
    return command if Path(program).name == command[0] else launcher


def plan(overrides: Sequence[str]) -> int:
    """`--dry-run`: the plan of the run. Makes the cached model if there is none, since the plan reads its size."""
    settings = quickstart_overrides(prepared(overrides), overrides)
    return load("asyncrl.cli.dry_run.command").main("local", settings)
