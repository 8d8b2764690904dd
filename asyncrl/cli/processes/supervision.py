"""Supervises the processes of a run from start to end: shows their progress, and restarts them after a kill.

consumes:     exit codes of the roles; rows of metrics.jsonl, to show them
waits for:    the learner, whose end is the end of the run
unblocked by: the learner's end, the failure of any role, Ctrl-C, SIGTERM or SIGHUP

A replay server that was killed is restarted at the same address: its state is in its journal, and the other
processes wait. A killed rollout pool or torchrun is restarted as well: the workers return, the learner resumes. If the
pool ends for good, the learner saves what it has trained before the run ends, as after Ctrl-C (`saving`). If this
process is killed, the kernel kills the roles, so that none of them can remain in the folder of another run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.cli.processes.commands import RESTARTED, Command
from asyncrl.cli.processes.ending import Ended
from asyncrl.cli.processes.saving import TURN_S, Notices, reason_to_save, save_first, watch
from asyncrl.cli.processes.supervisor import Role, Supervisor
from asyncrl.config import LOG_DIR
from asyncrl.schema import TelemetryConfig
from asyncrl.telemetry.folder.run_folder import STOP_FILE
from asyncrl.telemetry.live.console import say
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.starting import StartWatch
from asyncrl.telemetry.live.tails import PoolWords
from asyncrl.utils.restart_policy import Restarts

EXIT_REFUSED = 2
"""Exit code of a replay server for which a restart is useless: a refused setting, a damaged journal."""
FINISH_S = 30.0
"""Seconds that the rollout pool has to end by itself once the learner has finished."""
RESTARTS = 10
"""Limit on the restarts of pool and torchrun together in an hour, after a kill."""


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
    """Start `commands`, show the run until the role `learner` ends, then stop the rest."""
    telemetry = telemetry or TelemetryConfig()
    left = {True: Restarts(replay_restarts), False: Restarts(RESTARTS)}
    notices = Notices(folder / LOG_DIR, console)
    with (
        Supervisor(folder / LOG_DIR) as supervisor,
        RunView(folder, steps, console, resumed, telemetry.ignore_alarms) as view,
    ):
        starting = StartWatch(folder / LOG_DIR, [command.role for command in commands])
        pool = PoolWords(folder / LOG_DIR)
        for command in commands:
            supervisor.start(command.role, command.arguments, command.environment, command.enforced)
        while (supervisor.roles["learner"].code is None or supervisor.failed()) and not supervisor.signal:
            if supervisor.failed() and not restarted(supervisor, commands, folder, left, view):
                break
            watch(supervisor, view, notices)
            for line in (*starting.news(), *pool.news()):
                view.say(line)
            view.refresh("training" if view.trained else starting.state())
            if view.alarmed and telemetry.on_alarm == "stop":
                (folder / LOG_DIR / STOP_FILE).touch()
            time.sleep(TURN_S)
        supervisor.note_end()
        saved = True
        if view.trained and supervisor.roles["learner"].code is None and (why := reason_to_save(supervisor)):
            saved = save_first(supervisor, folder, view, notices, why)
        view.refresh("finishing")
        if supervisor.roles["learner"].code == 0 and not supervisor.signal and "rollout" in supervisor.roles:
            supervisor.wait_for("rollout", FINISH_S)
        signalled = supervisor.signal
        failed = supervisor.failed()
        # Stop the replay server last: a worker that cannot say goodbye to it waits until it is killed.
        supervisor.stop([name for name in supervisor.roles if name != "replay"])
        supervisor.stop(list(supervisor.roles))
        view.refresh()
    notices.show()
    for role in failed:
        show_failure(role, console)
    stopped = view.alarmed and telemetry.on_alarm == "stop" and view.unfinished
    code = 128 + signalled if signalled else 1 if failed or stopped else 0
    return Ended(code=code, saved=saved, hurried=supervisor.impatient, trained=view.last_step)


def restarted(
    supervisor: Supervisor, commands: Sequence[Command], folder: Path, left: dict[bool, Restarts], view: RunView
) -> bool:
    """Restart the failed roles if a restart can help for all of them.

    Args:
        left: remaining restarts of roles with a journal (True), and of the others (False).
    """
    if not (folder / LOG_DIR).is_dir():
        return False  # the folder was moved or deleted; a new one in its place would be in the way of its return
    failed = supervisor.failed()
    for role in failed:
        journal = role.name == "replay"
        # A role that exited by itself has logged why, and would exit again. A server with a journal may be restarted.
        hopeless = role.code == EXIT_REFUSED if journal else (role.code or 0) >= 0
        if hopeless or not left[journal].take():
            return False
    for role in failed:
        command = next(command for command in commands if command.role == role.name)
        view.say(f"{_called(role.name)} ended with exit code {role.code}: restarted {_resumes(role.name)}")
        supervisor.start(command.role, command.arguments, {**command.environment, RESTARTED: "1"}, command.enforced)
    return True


def _called(role: str) -> str:
    names = {"replay": "the replay server", "rollout": "the rollout pool", "learner": "torchrun"}
    return names.get(role, role)


def _resumes(role: str) -> str:
    return {"rollout": "with new workers", "learner": "from the newest checkpoint"}.get(role, "with its journal")


def show_failure(role: Role, console: Console) -> None:
    say(console, f"\n{role.name} failed with exit code {role.code}. The end of {role.log}:", role.tail())
