"""`asyncrl local`: starts replay server, rollout pool and torchrun on one machine, and ends them all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.checks.placement import visible_gpus
from asyncrl.cli.processes.commands import local_commands, tell_commands, with_gpus
from asyncrl.cli.processes.ending import Ended, best_line, how_to_go_on, resumed_from
from asyncrl.cli.processes.supervision import supervise
from asyncrl.cli.starting.preflight import check_start
from asyncrl.cli.starting.resuming import check_resumed, nothing_to_do, trained_whole
from asyncrl.collector import load
from asyncrl.config import JOURNAL_DIR, LOG_DIR
from asyncrl.errors import RunFolderError
from asyncrl.memory.fit import refuse_unfit
from asyncrl.replay.net.keyring import with_keys
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import trained_steps
from asyncrl.telemetry.folder.run_folder import (
    changes_in,
    prepare_run_folder,
    said_of_gone,
)
from asyncrl.telemetry.folder.tenants import occupied
from asyncrl.telemetry.live.console import PlainConsole, say
from asyncrl.telemetry.reports.summary import CURVES_FILE, read_metrics, suggestions, summary


def run_local(overrides: Sequence[str], *, typed: Sequence[str]) -> int:
    """Run everything. Exit code: 0, 1 if a role failed, 128 + a signal's number if stopped by one.

    `typed` is the command as the user gave it, for the suggestions at the end.

    Raises:
        ConfigError: a setting or this machine was refused. RunFolderError: the run folder is in use.
    """
    config, overrides, seen = check_start("local", overrides)
    for line in (*seen.prompts, *seen.reward, *refuse_unfit(config, "local")):
        print(line, flush=True)
    with occupied(config):
        return _run(config, overrides, typed)


def _run(config: Config, overrides: Sequence[str], typed: Sequence[str]) -> int:
    console = PlainConsole()
    run_id = uuid.uuid4().hex[:12]
    folder = Path(config.run.dir).resolve()
    if trained := trained_whole(config, folder):
        done = f"{trained} steps are trained and learner.steps={config.learner.steps}"
        say(console, nothing_to_do(folder, done, typed, f"learner.steps={2 * trained}"))
        return 0
    begins = check_resumed(config, lambda note: say(console, note))
    resumed = trained_steps(begins)
    say(console, *(f"this resume changes {change}" for change in changes_in(config)))
    prepare_run_folder(config, run_id, overrides=overrides, begins=begins)
    check_room(config, folder)
    with_keys(config)  # Creates the keys once; each role finds them by itself.
    commands = with_gpus(local_commands(config, overrides, run_id), config, visible_gpus() or ())
    if not Path(config.model.path).is_dir():
        say(
            console,
            f"model.path={config.model.path} is not a folder here, so it is taken as a name on the Hugging Face hub",
        )
    say(console, *tell_commands(commands, typed, folder / LOG_DIR))
    if config.resume != "never":
        say(console, resumed_from(resumed))
    restarts = config.replay.max_restarts if config.replay.durability == "journal" else 0
    ended = supervise(
        commands,
        folder,
        config.learner.steps,
        console,
        replay_restarts=restarts,
        resumed=resumed,
        telemetry=config.telemetry,
    )
    if gone := said_of_gone(run_id, folder):
        say(console, gone)
    else:
        show_report(config, folder, console, typed, ended, overrides)
    return ended.code


def check_room(config: Config, folder: Path) -> None:
    """Check that the journal fits: otherwise the server would wait for space, for a reason visible only in its log.

    Raises:
        RunFolderError: the first file of the journal does not exist, and `folder` has less free space than it takes.
    """
    begins = config.replay.durability == "journal" and not (folder / JOURNAL_DIR).is_dir()
    wanted_mb = config.replay.journal.segment_mb if begins else 0
    free_mb = shutil.disk_usage(folder).free >> 20
    if free_mb < wanted_mb:
        raise RunFolderError(
            f"run.dir={config.run.dir} has {free_mb} MiB free, but the first file of the journal needs "
            f"replay.journal.segment_mb={wanted_mb} MiB. Free space there, lower that setting, or give another run.dir"
        )


def show_report(
    config: Config, folder: Path, console: Console, typed: Sequence[str], ended: Ended, given: Sequence[str]
) -> None:
    """Summary, curves and what to type next. Nothing is drawn when no step was trained."""
    rows = read_metrics(folder)
    say(console, f"\n{summary(rows, config.replay)}")
    if not rows:
        again = "it contains nothing to keep: overwrite=true starts the run again in it"
        say(console, f"run folder: {folder}  ({again})")
        return
    drawn = CURVES_FILE
    try:
        if ended.hurried:  # matplotlib alone takes seconds to load
            drawn = f"not drawn in haste; `asyncrl report {folder}` draws them"
        else:
            load("asyncrl.telemetry.reports.curves").plot_curves(rows, folder / CURVES_FILE, config.run.name)
    # A full disk, a matplotlib that does not load here, or that finds no ticks between rewards of ±1e308: it must not
    # hide how the run itself ended.
    except Exception as error:
        drawn = f"not drawn, {error}"
    say(console, f"run folder: {folder}  (curves: {drawn})")
    if config.learner.keep_best:
        say(console, best_line(config.learner.keep_best, folder, rows))
    if ended.code:
        say(console, how_to_go_on(folder, typed, ended))
        return
    say(console, "now try:", *(f"  {line}" for line in suggestions(config, typed, given)))


def main(overrides: Sequence[str]) -> int:
    return run_local(overrides, typed=["asyncrl", "local", *overrides])
