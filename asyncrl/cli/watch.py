"""`asyncrl watch RUN`: see `asyncrl.telemetry.live.watching`."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from asyncrl.config import read_settings
from asyncrl.telemetry.folder.resumed import settings_file
from asyncrl.telemetry.folder.run_folder import steps_noted
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.live.watching import WatchView
from asyncrl.telemetry.metrics.alarms import ALARMS

TURN_S = 1.0


def main(folder: Path) -> int:
    """Watch until no process is in the run any more, or Ctrl-C, which leaves the run alone. Raises RunFolderError."""
    settings = read_settings(settings_file(folder))
    # Settings of another version, or edited by hand, must not prevent watching a run.
    steps, given = settings.get("learner.steps"), settings.get("telemetry.ignore_alarms")
    steps = steps if isinstance(steps, int) and steps else steps_noted(folder)
    ignored = [alarm.name for alarm in ALARMS if alarm.name in given] if isinstance(given, list) else []
    depth, bound = settings.get("replay.pipeline_depth"), settings.get("replay.max_staleness")
    bounds = (depth, bound) if isinstance(depth, int) and isinstance(bound, int) else None
    console = PlainConsole(highlight=False)
    with WatchView(folder.resolve(), steps, console, ignored=ignored, bounds=bounds) as view:
        while view.look():
            time.sleep(TURN_S)
    for part in view.below():
        if isinstance(part, Table):
            console.print_whole(part)
        else:
            console.print(part, soft_wrap=True)
    return 0
