"""One machine, all processes: `asyncrl local` starts replay server, rollout pool and torchrun, and ends them all.

consumes:     exit codes of the three roles; rows of metrics.jsonl, to show them
waits for:    the learner, whose end is the end of the run
unblocked by: the learner's end, the failure of any role, Ctrl-C or SIGTERM

A replay server, or a shard of it, that was killed is started again at the same address: its journal is its memory, and
the others wait.
"""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.commands import Command, local_commands
from asyncrl.config import JOURNAL_DIR, load_config
from asyncrl.environments.registry import find_environment
from asyncrl.errors import RunFolderError
from asyncrl.machine import check_machine
from asyncrl.schema import Config
from asyncrl.supervisor import Role, Supervisor
from asyncrl.telemetry.metrics import METRICS_FILE
from asyncrl.telemetry.progress import RunView
from asyncrl.telemetry.report import CURVES_FILE, plot_curves, read_metrics, suggestions, summary
from asyncrl.telemetry.run_folder import occupied, prepare_run_folder

TURN_S = 0.2
EXIT_REFUSED = 2
"""Of a replay server that a restart cannot help: a refused setting, a damaged journal."""
FINISH_S = 30.0
"""How long the rollout pool gets to end by itself once the learner has finished."""


def run_local(overrides: Sequence[str], *, typed: Sequence[str]) -> int:
    """The whole run. Exit code: 0, 1 when a role failed, 128 + a signal's number when stopped by one.

    `typed` is the command as the user gave it, for the suggestions at the end.

    Raises:
        ConfigError: a setting or this machine was refused. RunFolderError: the run folder is in use.
    """
    config = load_config(overrides)
    check_machine(config, "local")
    find_environment(config.environment)
    with occupied(config):
        return _run(config, overrides, typed)


def _run(config: Config, overrides: Sequence[str], typed: Sequence[str]) -> int:
    run_id = uuid.uuid4().hex[:12]
    folder = prepare_run_folder(config, run_id)
    check_room(config, folder)
    commands = local_commands(config, overrides, run_id)
    console = Console()
    if not Path(config.model.path).is_dir():
        said = f"model.path={config.model.path} is no folder here: taken for a name on the Hugging Face hub"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    for each in commands:
        console.print(f"[bold]{each.role}[/bold]", highlight=False)
        console.print(f"  {each}", markup=False, highlight=False, soft_wrap=True)
    restarts = config.replay.max_restarts if config.replay.durability == "journal" else 0
    code = supervise(commands, folder, config.learner.steps, console, replay_restarts=restarts)
    show_report(config, folder, console, typed)
    return code


def check_room(config: Config, folder: Path) -> None:
    """A server whose journal does not fit waits for space, and nobody looks for the reason in its log.

    Raises:
        RunFolderError: there is less room in `folder` than the first file of the journal takes, and it is not there.
    """
    begins = config.replay.durability == "journal" and not (folder / JOURNAL_DIR).is_dir()
    wanted_mb = config.replay.journal.segment_mb if begins else 0
    free_mb = shutil.disk_usage(folder).free >> 20
    if free_mb < wanted_mb:
        raise RunFolderError(
            f"run.dir={config.run.dir} has {free_mb} MiB free, and the journal begins with a file of "
            f"replay.journal.segment_mb={wanted_mb} MiB. Free space there, lower it, or give another run.dir"
        )


def supervise(
    commands: Sequence[Command], folder: Path, steps: int, console: Console, *, replay_restarts: int = 0
) -> int:
    """Start `commands`, show the run until the role `learner` ends, stop the rest. Returns the exit code."""
    with Supervisor(folder / "logs") as supervisor, RunView(folder, steps, console) as view:
        for command in commands:
            supervisor.start(command.role, command.arguments, command.environment)
        learner = supervisor.roles["learner"]
        while learner.code is None and not supervisor.signal:
            if supervisor.failed():
                if replay_restarts == 0 or not restarted_replay(supervisor, commands, console):
                    break
                replay_restarts -= 1
            supervisor.observe()
            view.refresh("training" if (folder / METRICS_FILE).exists() else "starting the processes")
            time.sleep(TURN_S)
        view.refresh("finishing")
        if learner.code == 0 and "rollout" in supervisor.roles:
            supervisor.wait_for("rollout", FINISH_S)
        signalled = supervisor.signal
        failed = supervisor.failed()
        # The replay server and its shards last: a worker that cannot say goodbye to them waits until it is killed.
        supervisor.stop([name for name in supervisor.roles if not _has_journal(name)])
        supervisor.stop(list(supervisor.roles))
    for role in failed:
        _show_failure(role, console)
    if signalled:
        console.print(f"stopped by signal {signalled}; continue with resume=auto", highlight=False)
        return 128 + signalled
    return 1 if failed else 0


def restarted_replay(supervisor: Supervisor, commands: Sequence[Command], console: Console) -> bool:
    """Start the replay server or its shards again when nobody else has failed, and a restart can mend it."""
    failed = supervisor.failed()
    if any(not _has_journal(role.name) or role.code == EXIT_REFUSED for role in failed):
        return False
    for role in failed:
        command = next(command for command in commands if command.role == role.name)
        name = "the replay server" if role.name == "replay" else f"{role.name} of the replay"
        said = f"{name} ended with exit code {role.code}: started again on its journal"
        console.print(said, highlight=False, soft_wrap=True)
        supervisor.start(command.role, command.arguments, command.environment)
    return True


def _has_journal(role: str) -> bool:
    return role == "replay" or role.startswith("shard-")


def _show_failure(role: Role, console: Console) -> None:
    said = f"\n{role.name} failed with exit code {role.code}. The end of {role.log}:"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print(role.tail(), markup=False, highlight=False, soft_wrap=True)


def show_report(config: Config, folder: Path, console: Console, typed: Sequence[str]) -> None:
    """Summary, curves and suggestions. Nothing is drawn when no step was trained."""
    rows = read_metrics(folder)
    console.print(f"\n{summary(rows)}", markup=False, highlight=False, soft_wrap=True)
    if not rows:
        again = f"run folder: {folder}  (nothing in it to keep: overwrite=true starts again in it)"
        console.print(again, markup=False, highlight=False, soft_wrap=True)
        return
    try:
        plot_curves(rows, folder / CURVES_FILE, config.run.name)
        drawn = CURVES_FILE
    except OSError as error:  # a full disk: the run's own end and exit code say more
        drawn = f"not drawn, {error}"
    console.print(f"run folder: {folder}  (curves: {drawn})", markup=False, highlight=False, soft_wrap=True)
    console.print("now try:", highlight=False)
    for line in suggestions(config, typed):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def main(overrides: Sequence[str]) -> int:
    return run_local(overrides, typed=["asyncrl", "local", *overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
