"""Fake roles of a run, each one line of Python."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.cli.processes.commands import Command
from asyncrl.cli.processes.supervision import supervise

FOREVER = "import time; time.sleep(600)"
FINE = "pass"


def roles(**code: str) -> list[Command]:
    return [Command(role=name, arguments=(sys.executable, "-c", text), environment={}) for name, text in code.items()]


def run(commands: list[Command], folder: Path) -> tuple[int, str]:
    (folder / "logs").mkdir()
    out = io.StringIO()
    ended = supervise(commands, folder, 10, Console(file=out, width=200))
    return ended.code, out.getvalue()
