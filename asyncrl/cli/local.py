"""One machine, all processes: `asyncrl local` starts replay server, rollout pool and torchrun, and ends them all.

consumes:     exit codes of the three roles; rows of metrics.jsonl, to show them
waits for:    the learner, whose end is the end of the run
unblocked by: the learner's end, the failure of any role, Ctrl-C, SIGTERM or SIGHUP

A replay server, or a shard of it, that was killed is started again at the same address: its journal is its memory, and
the others wait. So are a rollout pool and torchrun that were killed: the workers come back, the learner resumes. When
this process is killed the kernel kills the roles, and none of them can be left in the folder of another run.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from asyncrl.checks.hints import nearest
from asyncrl.checks.machine import check_machine
from asyncrl.checks.placement import visible_gpus
from asyncrl.cli.processes.commands import RESTARTED, Command, local_commands, with_gpus
from asyncrl.cli.processes.supervisor import Role, Supervisor
from asyncrl.cli.starting.preflight import check_environments, check_own_learning, look_ahead, with_steps
from asyncrl.collector import load
from asyncrl.config import JOURNAL_DIR, LOG_DIR, load_config
from asyncrl.errors import CheckpointError, RunFolderError
from asyncrl.replay.net.keyring import with_keys
from asyncrl.restarts import Restarts
from asyncrl.schema import Config, TelemetryConfig
from asyncrl.storage.best import BEST, read_best
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, EXPORT_DIR, chosen, proven, trained_in, trained_steps
from asyncrl.storage.full_disk import BOARD_FILE, read_board
from asyncrl.telemetry.folder.resumed import kept_dtypes
from asyncrl.telemetry.folder.run_folder import (
    STOP_FILE,
    changes_in,
    occupied,
    owner_of,
    prepare_run_folder,
    refuse_used_folder,
    said_of_gone,
)
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.live.pool_words import PoolWords
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.starting import StartWatch
from asyncrl.telemetry.metrics.evaluations import Row
from asyncrl.telemetry.reports.summary import CURVES_FILE, read_metrics, suggestions, summary, without

TURN_S = 0.2
EXIT_REFUSED = 2
"""Of a replay server that a restart cannot help: a refused setting, a damaged journal."""
FINISH_S = 30.0
"""How long the rollout pool gets to end by itself once the learner has finished."""
SAVE_S = 600.0
"""How long the learner gets, after Ctrl-C, to end its step and save a checkpoint."""
RESTARTS = 10
"""Of pool and torchrun together in an hour, after a kill."""


def run_local(overrides: Sequence[str], *, typed: Sequence[str]) -> int:
    """The whole run. Exit code: 0, 1 when a role failed, 128 + a signal's number when stopped by one.

    `typed` is the command as the user gave it, for the suggestions at the end.

    Raises:
        ConfigError: a setting or this machine was refused. RunFolderError: the run folder is in use.
    """
    config = load_config(overrides)
    overrides = [*overrides, *kept_dtypes(config, overrides)]
    config = load_config(overrides)
    check_machine(config, "local")
    check_environments(config)
    check_own_learning(config)
    refuse_used_folder(config)
    seen = look_ahead(config)
    for line in (*seen.prompts, *seen.reward):
        print(line, flush=True)
    config, overrides = with_steps(config, overrides, seen.rows)
    with occupied(config):
        return _run(config, overrides, typed)


def _run(config: Config, overrides: Sequence[str], typed: Sequence[str]) -> int:
    console = PlainConsole()
    run_id = uuid.uuid4().hex[:12]
    folder = Path(config.run.dir).resolve()
    if trained := trained_whole(config, folder):
        _say(console, nothing_to_do(config, folder, trained, typed))
        return 0
    begins = check_resumed(config, lambda note: _say(console, note))
    resumed = trained_steps(begins)
    for change in changes_in(config):
        _say(console, f"this resume changes {change}")
    prepare_run_folder(config, run_id, overrides=overrides, begins=begins)
    check_room(config, folder)
    with_keys(config)  # Here, once; each role finds them by itself.
    commands = with_gpus(local_commands(config, overrides, run_id), config, visible_gpus() or ())
    if not Path(config.model.path).is_dir():
        _say(console, f"model.path={config.model.path} is no folder here: taken for a name on the Hugging Face hub")
    for each in commands:
        console.print(f"[bold]{each.role}[/bold]", highlight=False)
        _say(console, f"  {each}")
    if config.resume != "never":
        _say(console, f"resumed from step {resumed}" if resumed else "no checkpoint to resume from: begins at step 0")
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
        _say(console, gone)
    else:
        show_report(config, folder, console, typed, ended)
    return ended.code


def nothing_to_do(config: Config, folder: Path, trained: int, typed: Sequence[str]) -> str:
    kept = without(typed, ("learner.steps", "learner.epochs", "resume", "overwrite"))
    more = shlex.join([*kept, f"learner.steps={2 * trained}", "resume=auto"])
    return (
        f"nothing to do: {trained} steps are trained and learner.steps={config.learner.steps}. "
        f"The model is in {folder / EXPORT_DIR}. To train on:\n  {more}"
    )


def trained_whole(config: Config, folder: Path) -> int:
    """Steps of a run that has come to its end and left its model; 0 of one that has not."""
    with suppress(CheckpointError):  # the start judges it
        resumed = trained_steps(chosen(folder, config.resume))
        if resumed >= config.learner.steps and trained_in(folder / EXPORT_DIR) == resumed:
            return resumed
    return 0


def check_resumed(config: Config, say: Callable[[str], None]) -> Path | None:
    """Found only when a rank restores, damage would burn every restart of torchrun first.

    Returns:
        The checkpoint from which the run goes on, whole.

    Raises:
        RunFolderError: the run that is to go on is damaged, or its files contradict each other.
        CheckpointDamagedError: the checkpoint that `resume` names is.
    """
    if config.resume == "never":
        return None
    newest, folder = None, Path(config.run.dir).resolve()
    if owner_of(folder) is not None:
        newest = load("asyncrl.cli.starting.folder_check").refuse_damaged(folder, config.resume, say)
    return newest if newest and config.resume == "auto" else proven(folder, config.resume, say)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run came to its end."""

    code: int
    """0, 1 when a role failed or an alarm stopped the run, 128 + the number of the signal that stopped it."""
    saved: bool = True
    """After a signal: the learner saved what it had trained."""


def supervise(
    commands: Sequence[Command],
    folder: Path,
    steps: int,
    console: Console,
    *,
    replay_restarts: int = 0,
    resumed: int = 0,
    telemetry: TelemetryConfig | None = None,
) -> Ended:
    """Start `commands`, show the run until the role `learner` ends, stop the rest."""
    telemetry = telemetry or TelemetryConfig()
    left = {True: Restarts(replay_restarts), False: Restarts(RESTARTS)}
    notices = Notices(folder / LOG_DIR / BOARD_FILE, console)
    with (
        Supervisor(folder / LOG_DIR) as supervisor,
        RunView(folder, steps, console, resumed, telemetry.ignore_alarms) as view,
    ):
        starting = StartWatch(folder / LOG_DIR, [command.role for command in commands])
        pool = PoolWords(folder / LOG_DIR / "rollout.log")
        for command in commands:
            supervisor.start(command.role, command.arguments, command.environment, command.enforced)
        while (supervisor.roles["learner"].code is None or supervisor.failed()) and not supervisor.signal:
            if supervisor.failed() and not restarted(supervisor, commands, left, view):
                break
            watch(supervisor, view, notices)
            for line in (*starting.news(), *pool.news()):
                view.say(line)
            view.refresh("training" if view.trained else starting.state())
            if view.alarmed and telemetry.on_alarm == "stop":
                (folder / LOG_DIR / STOP_FILE).touch()
            time.sleep(TURN_S)
        supervisor.note_end()
        saved = view.trained and save_first(supervisor, folder, view, notices) if supervisor.signal else True
        view.refresh("finishing")
        if supervisor.roles["learner"].code == 0 and not supervisor.signal and "rollout" in supervisor.roles:
            supervisor.wait_for("rollout", FINISH_S)
        signalled = supervisor.signal
        failed = supervisor.failed()
        # The replay server and its shards last: a worker that cannot say goodbye to them waits until it is killed.
        supervisor.stop([name for name in supervisor.roles if not _has_journal(name)])
        supervisor.stop(list(supervisor.roles))
        view.refresh()
    notices.show()
    for role in failed:
        show_failure(role, console)
    stopped = view.alarmed and telemetry.on_alarm == "stop" and view.unfinished
    return Ended(code=128 + signalled if signalled else 1 if failed or stopped else 0, saved=saved)


class Notices:
    """What the roles say of a full disk: their logs lie on it."""

    def __init__(self, board: Path, console: Console) -> None:
        self._board, self._console = board, console
        self._shown = read_board(board)

    def show(self) -> None:
        """What is new."""
        text = read_board(self._board)
        if text != self._shown:
            self._shown = text
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch(supervisor: Supervisor, view: RunView, notices: Notices) -> None:
    notices.show()
    for said in supervisor.observe():
        view.say(said)


def save_first(supervisor: Supervisor, folder: Path, view: RunView, notices: Notices) -> bool:
    """Have the learner save a checkpoint and end; false when it did not, or a second signal came first.

    waits for: the learner's step and its checkpoint, `SAVE_S` at most; unblocked by: its end, the failure of another
    role, a second signal
    """
    learner = supervisor.roles["learner"]
    if learner.code is not None:
        return learner.code == 0
    name = signal.Signals(supervisor.signal).name
    view.say(f"{name}: the learner ends its step and saves a checkpoint. Once more (Ctrl-C) ends the run at once")
    try:
        (folder / LOG_DIR / STOP_FILE).touch()
    except OSError as error:
        view.say(f"the learner cannot be asked for a checkpoint: {error}")
        return False
    deadline = time.monotonic() + SAVE_S
    while learner.code is None and not supervisor.impatient and time.monotonic() < deadline:
        if supervisor.failed():
            break
        watch(supervisor, view, notices)
        view.refresh("saving a checkpoint")
        time.sleep(TURN_S)
    return learner.code == 0


def restarted(supervisor: Supervisor, commands: Sequence[Command], left: dict[bool, Restarts], view: RunView) -> bool:
    """Start what failed again, where a restart can mend all of it.

    Args:
        left: of roles that have a journal, and of the others.
    """
    failed = supervisor.failed()
    for role in failed:
        journal = _has_journal(role.name)
        # What ended by itself has said why, and would again; the journal makes a server's end by itself harmless.
        hopeless = role.code == EXIT_REFUSED if journal else (role.code or 0) >= 0
        if hopeless or not left[journal].take():
            return False
    for role in failed:
        command = next(command for command in commands if command.role == role.name)
        view.say(f"{_called(role.name)} ended with exit code {role.code}: started again {_resumes(role.name)}")
        supervisor.start(command.role, command.arguments, {**command.environment, RESTARTED: "1"}, command.enforced)
    return True


def _called(role: str) -> str:
    names = {"replay": "the replay server", "rollout": "the rollout pool", "learner": "torchrun"}
    return names.get(role, f"{role} of the replay")


def _resumes(role: str) -> str:
    return {"rollout": "with new workers", "learner": "from the newest checkpoint"}.get(role, "on its journal")


def _has_journal(role: str) -> bool:
    return role == "replay" or role.startswith("shard-")


def show_failure(role: Role, console: Console) -> None:
    _say(console, f"\n{role.name} failed with exit code {role.code}. The end of {role.log}:")
    _say(console, role.tail())


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_report(config: Config, folder: Path, console: Console, typed: Sequence[str], ended: Ended) -> None:
    """Summary, curves and what to type next. Nothing is drawn when no step was trained."""
    rows = read_metrics(folder)
    _say(console, f"\n{summary(rows)}")
    if not rows:
        again = "nothing in it to keep: overwrite=true starts again in it"
        _say(console, f"run folder: {folder}  ({again})")
        return
    try:
        load("asyncrl.telemetry.reports.curves").plot_curves(rows, folder / CURVES_FILE, config.run.name)
        drawn = CURVES_FILE
    # A full disk, a matplotlib that does not load here, or finds no ticks between rewards of ±1e308: the run's own end
    # and exit code say more.
    except Exception as error:
        drawn = f"not drawn, {error}"
    _say(console, f"run folder: {folder}  (curves: {drawn})")
    if config.learner.keep_best:
        _say(console, best_line(config.learner.keep_best, folder, rows))
    if ended.code:
        _say(console, how_to_go_on(folder, typed, ended))
        return
    _say(console, "now try:")
    for line in suggestions(config, typed):
        _say(console, f"  {line}")


def best_line(metric: str, folder: Path, rows: Sequence[Row]) -> str:
    """Which checkpoint is the best by `metric`, or that none is."""
    best = read_best(folder / CHECKPOINT_DIR)
    if best is not None and best.metric == metric:
        return f"best checkpoint: {folder / CHECKPOINT_DIR / BEST}, of step {best.step}: {metric} {best.value:g}"
    known = {name for row in rows for name in row}
    hint = "" if metric in known else nearest(metric, known)
    return f"learner.keep_best={metric}: no checkpoint has a value of it.{hint}"


def how_to_go_on(folder: Path, typed: Sequence[str], ended: Ended) -> str:
    """The command that resumes a run which did not come to its end, and what it resumes from."""
    again, resume = shlex.join(without(typed, ("resume", "overwrite"))), "resume=auto"
    what = "stopped" if ended.code > 128 and ended.saved else "ended"
    try:
        step = trained_steps(chosen(folder, "auto"))
        saved = f"the newest checkpoint is that of step {step}" if step else "no checkpoint was saved"
        named = [text for text in typed if text.startswith("resume=") and text not in ("resume=never", resume)]
        if named and not step:  # a fork: with `auto` it would begin at step 0, with the model itself
            resume = shlex.quote(named[-1])
    except CheckpointError as error:
        saved = str(error)
    return f"{what}; {saved}. Go on with:\n  {again} {resume}"


def main(overrides: Sequence[str]) -> int:
    return run_local(overrides, typed=["asyncrl", "local", *overrides])
