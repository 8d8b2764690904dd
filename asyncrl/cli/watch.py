"""`asyncrl watch RUN`: see `asyncrl.telemetry.watching`."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from asyncrl.config import read_settings
from asyncrl.errors import RunFolderError
from asyncrl.telemetry.console import PlainConsole
from asyncrl.telemetry.resumed import CONFIG_FILE
from asyncrl.telemetry.run_folder import steps_noted
from asyncrl.telemetry.watching import WatchView

TURN_S = 1.0


def main(folder: Path) -> int:
    """Until nobody is in the run any more, or Ctrl-C, which the run does not notice. Raises RunFolderError."""
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(f"{folder} is no run folder: it has no {CONFIG_FILE}. Give a folder such as runs/NAME")
    settings = read_settings(folder / CONFIG_FILE)
    steps = settings.get("learner.steps") or steps_noted(folder)
    ignored = settings.get("telemetry.ignore_alarms") or []
    console = PlainConsole(highlight=False)
    with WatchView(folder.resolve(), steps, console, ignored=ignored) as view:
        while view.look():
            time.sleep(TURN_S)
    for part in view.below():
        if isinstance(part, Table):
            console.print_whole(part)
        else:
            console.print(part, soft_wrap=True)
    return 0
