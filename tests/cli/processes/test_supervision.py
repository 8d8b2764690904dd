"""Supervision with small fake roles: which role stops which, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli.processes import saving, supervision
from asyncrl.cli.processes.ending import Ended
from asyncrl.cli.processes.supervision import supervise
from asyncrl.telemetry.live import tails
from asyncrl.telemetry.live.progress import RunView
from tests.cli.fake_roles import FINE, FOREVER, roles, run
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)

LEAVING = """
import pathlib, signal, sys, time
here = pathlib.Path({here!r})
def leave(*_):
    {leave}
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(here / {name!r}).touch()
time.sleep(600)
"""

WAITING = """
import pathlib, time
while not all((pathlib.Path({here!r}) / name).exists() for name in ("replay", "rollout")):
    time.sleep(0.02)
exit(3)
"""

SAVING = """
import pathlib, sys, time
stop, folder = pathlib.Path({stop!r}), pathlib.Path({folder!r})
(folder / "metrics.jsonl").write_text('{{"step": 1, "policy_version": 1}}' + chr(10))
while not stop.exists(): time.sleep(0.02)
(folder / "asked").touch()
time.sleep({takes})
(folder / "saved").touch()
"""


def test_the_run_is_over_when_the_learner_is_and_the_server_is_stopped(tmp_path: Path) -> None:
    code, out = run(roles(replay=FOREVER, rollout=FINE, learner=FINE), tmp_path)
    assert code == 0
    assert "failed" not in out


def test_a_failing_learner_fails_the_run_and_shows_its_log(tmp_path: Path) -> None:
    code, out = run(roles(replay=FOREVER, rollout=FOREVER, learner="raise SystemExit('no loss today')"), tmp_path)
    assert code == 1
    assert "learner failed with exit code 1" in out
    assert "no loss today" in out


@pytest.mark.parametrize("role", ["replay", "rollout"])
def test_the_death_of_another_role_stops_the_learner(role: str, tmp_path: Path) -> None:
    started = time.monotonic()
    code, out = run(roles(**{"replay": FOREVER, "rollout": FOREVER, "learner": FOREVER, role: "exit(3)"}), tmp_path)
    assert code == 1
    assert f"{role} failed with exit code 3" in out
    assert "learner failed" not in out
    assert time.monotonic() - started < 100


def test_a_killed_replay_server_is_started_again_and_a_refused_one_is_not(tmp_path: Path) -> None:
    dies = "import os, pathlib; p = pathlib.Path('lives'); p.write_text(p.read_text() + 'x' if p.exists() else 'x'); "
    killed = roles(
        replay=dies.replace("'lives'", repr(str(tmp_path / "lives")))
        + "os.kill(os.getpid(), 9) if len(p.read_text()) < 3 else __import__('time').sleep(600)",
        learner=f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'lives')!r}).exists() or "
        f"len(pathlib.Path({str(tmp_path / 'lives')!r}).read_text()) < 3: time.sleep(0.05)",
    )
    (tmp_path / "logs").mkdir()
    out = io.StringIO()
    assert supervise(killed, tmp_path, 10, Console(file=out, width=200), replay_restarts=2).code == 0
    assert out.getvalue().count("restarted with its journal") == 2
    refused = roles(replay="exit(2)", learner=FOREVER)
    assert supervise(refused, tmp_path, 10, Console(file=out, width=200), replay_restarts=2).code == 1
    assert out.getvalue().count("restarted with its journal") == 2


def test_a_pool_that_fails_after_the_learner_has_finished_fails_the_run(tmp_path: Path) -> None:
    learner = f"import os, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(f'{{os.getpid()}} ')"
    # A process that ended is there until the supervisor has asked how it ended.
    rollout = f"""
import os, pathlib, time
note = pathlib.Path({str(tmp_path / "pid")!r})
while not note.exists() or " " not in note.read_text(): time.sleep(0.02)
while os.path.exists("/proc/" + note.read_text().strip()): time.sleep(0.02)
exit(4)
"""
    code, out = run(roles(replay=FOREVER, rollout=rollout, learner=learner), tmp_path)
    assert code == 1
    assert "rollout failed with exit code 4" in out


def test_a_pool_that_does_not_end_is_stopped_without_failing_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FINISH_S", 0.5)
    code, _ = run(roles(replay=FOREVER, rollout=FOREVER, learner=FINE), tmp_path)
    assert code == 0


def test_the_replay_server_is_there_until_everybody_else_has_left(tmp_path: Path) -> None:
    here = str(tmp_path)
    told = "time.sleep(0.3); (here / 'alone').write_text(str((here / 'gone').exists()))"
    commands = roles(
        replay=LEAVING.format(here=here, name="replay", leave="(here / 'gone').touch()"),
        rollout=LEAVING.format(here=here, name="rollout", leave=told),
        learner=WAITING.format(here=here),
    )
    assert run(commands, tmp_path)[0] == 1
    assert (tmp_path / "alone").read_text() == "False" and (tmp_path / "gone").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_all_roles_with_the_code_of_the_signal(number: int, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def interrupt() -> None:
        until(begun.exists)
        os.kill(os.getpid(), number)

    caller = threading.Thread(target=interrupt)
    caller.start()
    learner = f"import pathlib; pathlib.Path({str(begun)!r}).touch(); {FOREVER}"
    code, out = run(roles(replay=FOREVER, rollout=FOREVER, learner=learner), tmp_path)
    caller.join()
    assert code == 128 + number
    assert "failed" not in out


@pytest.mark.parametrize("patient", [True, False])
def test_the_first_ctrl_c_lets_the_learner_save_and_the_second_ends_the_run_at_once(
    tmp_path: Path, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = threading.Event()
    take = RunView._take

    def notes(view: RunView, row: dict[str, Any]) -> None:
        take(view, row)
        shown.set()

    monkeypatch.setattr(RunView, "_take", notes)
    learner = SAVING.format(stop=str(tmp_path / "logs" / "stop"), folder=str(tmp_path), takes=0.5 if patient else 600)

    def interrupt() -> None:
        assert shown.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        until((tmp_path / "asked").exists)
        if not patient:
            os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "logs").mkdir()
    caller, out = threading.Thread(target=interrupt), io.StringIO()
    caller.start()
    commands = roles(replay=FOREVER, rollout=FOREVER, learner=learner)
    ended = supervise(commands, tmp_path, 10, Console(file=out, width=200))
    caller.join()
    assert ended == Ended(code=130, saved=patient, hurried=not patient)
    assert (tmp_path / "saved").exists() == patient
    assert "SIGINT: the learner ends its step and saves a checkpoint" in out.getvalue()


FAILING = """
import pathlib, time
while not pathlib.Path({shown!r}).exists(): time.sleep(0.02)
exit(1)
"""


def watched_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set, and a file made, once a row was shown."""
    shown, take = threading.Event(), RunView._take

    def notes(view: RunView, row: dict[str, Any]) -> None:
        take(view, row)
        (folder / "shown").touch()
        shown.set()

    monkeypatch.setattr(RunView, "_take", notes)
    return shown


def test_a_pool_that_ends_for_good_lets_the_learner_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched_rows(tmp_path, monkeypatch)
    learner = SAVING.format(stop=str(tmp_path / "logs" / "stop"), folder=str(tmp_path), takes=0.5)
    pool = FAILING.format(shown=str(tmp_path / "shown"))
    code, out = run(roles(replay=FOREVER, rollout=pool, learner=learner), tmp_path)
    assert code == 1
    assert (tmp_path / "saved").exists(), "the learner was ended before it had saved"
    assert "rollout failed: the learner ends its step and saves a checkpoint" in out
    assert "rollout failed with exit code 1" in out and "learner failed" not in out


def test_a_server_that_ends_for_good_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched_rows(tmp_path, monkeypatch)
    learner = SAVING.format(stop=str(tmp_path / "logs" / "stop"), folder=str(tmp_path), takes=0.5)
    server = FAILING.format(shown=str(tmp_path / "shown"))
    code, _ = run(roles(replay=server, rollout=FOREVER, learner=learner), tmp_path)
    assert code == 1 and not (tmp_path / "asked").exists(), "it holds what a checkpoint needs"


LONG_STEP = """
import pathlib, time
stop, folder = pathlib.Path({stop!r}), pathlib.Path({folder!r})
row = '{{"step": %d, "policy_version": 1, "time/step": 42.0}}' + chr(10)
(folder / "metrics.jsonl").write_text(row % 1 + row % 2)
while not stop.exists(): time.sleep(0.02)
time.sleep(2)
print({saving!r} + " 2", flush=True)
time.sleep(2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_wait_for_a_long_step_and_its_checkpoint_is_told(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = watched_rows(tmp_path, monkeypatch)
    monkeypatch.setattr(saving, "SAY_S", 0.5)
    monkeypatch.setattr(saving, "KILL_S", 1.0)
    learner = LONG_STEP.format(stop=str(tmp_path / "logs" / "stop"), folder=str(tmp_path), saving=tails.SAVING)

    def interrupt() -> None:
        assert shown.wait(60)
        os.kill(os.getpid(), number)

    caller = threading.Thread(target=interrupt)
    caller.start()
    code, out = run(roles(replay=FOREVER, rollout=FOREVER, learner=learner), tmp_path)
    caller.join()
    name = signal.Signals(number).name
    assert code == 128 + number
    said = " ".join(out.split())
    assert re.search(rf"{name}: waiting for the learner for \d s; it ends step 3 \(the last step took 42 s\)", said)
    assert re.search(rf"{name}: waiting for the learner for \d s; it saves the checkpoint of step 2", said)
    lost = re.search(r"after \d s steps 1 to 2 are not saved, because it ends step 3", said)
    assert bool(lost) == (number == signal.SIGTERM)
    assert ("continues from the start" in said) == (number == signal.SIGTERM)


@pytest.mark.parametrize("role", ["rollout", "learner"])
def test_a_killed_pool_or_torchrun_is_started_again_and_told_so(role: str, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    dies = f"""
import os, pathlib
lives = pathlib.Path({str(lives)!r})
if "ASYNCRL_RESTARTED" not in os.environ: os.kill(os.getpid(), 9)
lives.touch()
"""
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(lives)!r}).exists(): time.sleep(0.02)"
    commands = roles(**({"replay": FOREVER, "rollout": waits, "learner": waits} | {role: dies}))
    code, out = run(commands, tmp_path)
    assert code == 0, out
    assert "ended with exit code -9: restarted" in out


def test_the_rows_of_the_run_are_shown_while_it_goes_on(tmp_path: Path) -> None:
    row = json.dumps({"step": 1, "policy_version": 1, "reward/mean": 0.125})
    learner = f"open({str(tmp_path / 'metrics.jsonl')!r}, 'w').write({row!r} + chr(10))"
    code, out = run(roles(replay=FOREVER, rollout=FINE, learner=learner), tmp_path)
    assert code == 0
    assert "step 1 | version 1 | reward 0.125" in out
