"""The conductor with small fake roles: who stops whom, and with which exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli import local
from asyncrl.cli.arguments.overrides import quoted
from asyncrl.cli.dry_run.command import resume_lines
from asyncrl.cli.local import check_room, show_report
from asyncrl.cli.processes.commands import Command, learner_command, local_commands
from asyncrl.cli.processes.ending import Ended, how_to_go_on
from asyncrl.cli.processes.supervision import supervise
from asyncrl.cli.starting.resuming import nothing_to_do
from asyncrl.config import load_config
from asyncrl.errors import CheckpointDamagedError, RunFolderError
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.schema import Config
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import begin_branch, newest_proven
from asyncrl.telemetry.folder.resumed import resumed_lines
from asyncrl.telemetry.folder.run_folder import begin_settings, origin_of, prepare_run_folder
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.reports import curves

pytestmark = pytest.mark.timeout(400)

FOREVER = "import time; time.sleep(600)"
FINE = "pass"
REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]


def roles(**code: str) -> list[Command]:
    return [Command(role=name, arguments=(sys.executable, "-c", text), environment={}) for name, text in code.items()]


def run(commands: list[Command], folder: Path) -> tuple[int, str]:
    (folder / "logs").mkdir()
    out = io.StringIO()
    ended = supervise(commands, folder, 10, Console(file=out, width=200))
    return ended.code, out.getvalue()


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
    assert out.getvalue().count("started again on its journal") == 2
    (tmp_path / "lives").unlink()
    shard = [
        Command(role="shard-0", arguments=killed[0].arguments, environment={}),
        Command(role="learner", arguments=killed[1].arguments, environment={}),
    ]
    assert supervise(shard, tmp_path, 10, Console(file=out, width=200), replay_restarts=2).code == 0
    assert out.getvalue().count("shard-0 of the replay ended with exit code -9: started again on its journal") == 2
    refused = roles(replay="exit(2)", learner=FOREVER)
    assert supervise(refused, tmp_path, 10, Console(file=out, width=200), replay_restarts=2).code == 1
    assert out.getvalue().count("started again on its journal") == 4


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
    monkeypatch.setattr(local, "FINISH_S", 0.5)
    code, _ = run(roles(replay=FOREVER, rollout=FOREVER, learner=FINE), tmp_path)
    assert code == 0


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
        deadline = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    caller = threading.Thread(target=interrupt)
    caller.start()
    learner = f"import pathlib; pathlib.Path({str(begun)!r}).touch(); {FOREVER}"
    code, out = run(roles(replay=FOREVER, rollout=FOREVER, learner=learner), tmp_path)
    caller.join()
    assert code == 128 + number
    assert "failed" not in out


SAVING = """
import pathlib, sys, time
stop, folder = pathlib.Path({stop!r}), pathlib.Path({folder!r})
(folder / "metrics.jsonl").write_text('{{"step": 1, "policy_version": 1}}' + chr(10))
while not stop.exists(): time.sleep(0.02)
(folder / "asked").touch()
time.sleep({takes})
(folder / "saved").touch()
"""


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
        deadline = time.monotonic() + 60
        while not (tmp_path / "asked").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not patient:
            os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "logs").mkdir()
    caller, out = threading.Thread(target=interrupt), io.StringIO()
    caller.start()
    commands = roles(replay=FOREVER, rollout=FOREVER, learner=learner)
    ended = supervise(commands, tmp_path, 10, Console(file=out, width=200))
    caller.join()
    assert ended == Ended(code=130, saved=patient)
    assert (tmp_path / "saved").exists() == patient
    assert "SIGINT: the learner ends its step and saves a checkpoint" in out.getvalue()


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
    assert "ended with exit code -9: started again" in out


def test_an_ended_run_says_from_where_and_how_it_goes_on(tmp_path: Path) -> None:
    saved = tmp_path / "ckpt" / "step_20"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text('{"step": 19, "policy_version": 21}')
    (tmp_path / "ckpt" / "latest").symlink_to("step_20")
    typed = ["asyncrl", "local", "model.path=a b", "overwrite=true", "resume=never"]
    assert how_to_go_on(tmp_path, typed, Ended(code=130)) == (
        "stopped; the newest checkpoint is that of step 20. Go on with:\n  asyncrl local 'model.path=a b' resume=auto"
    )
    config = load_config([*REQUIRED, "resume=auto", "learner.steps=20"])
    said = nothing_to_do(config, tmp_path, 20, [*typed, "learner.steps=20"])
    assert said.startswith("nothing to do: 20 steps are trained and learner.steps=20")
    assert said.endswith("learner.steps=40 resume=auto")
    (saved / "state.json").write_text("{")
    assert "step_20/state.json cannot be read" in how_to_go_on(tmp_path, typed, Ended(code=1))
    assert "no checkpoint was saved" in how_to_go_on(tmp_path / "none", typed, Ended(code=1))


def test_a_fork_that_has_saved_nothing_is_told_to_begin_from_its_checkpoint_again(tmp_path: Path) -> None:
    typed = ["asyncrl", "local", "resume=old/ckpt/step_50"]
    assert how_to_go_on(tmp_path, typed, Ended(code=1)) == (
        "ended; no checkpoint was saved. Go on with:\n  asyncrl local resume=old/ckpt/step_50"
    )


def test_a_start_says_what_the_learner_will_do_when_the_link_to_the_newest_checkpoint_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}", "learner.steps=30"])
    folder = prepare_run_folder(first, "one")
    saved = folder / "ckpt" / "step_20"
    saved.mkdir(parents=True)
    state = LearnerState(step=19, policy_version=20, skipped_steps=0, run=origin_of(folder))
    (saved / "state.json").write_text(json.dumps(asdict(state)))
    sealed.seal(saved)
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    resumed = replace(first, resume="auto")
    assert local._run(resumed, [], ["asyncrl", "local"]) == 0
    said = capsys.readouterr().out
    assert "latest is missing: going on from step_20" in said and "\nresumed from step 20\n" in said
    assert Checkpoints(folder / "ckpt", rank=0, keep=1).choose("auto", restarted=False) == saved


def a_run_with_two_checkpoints(tmp_path: Path) -> tuple[Config, Path]:
    first = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}", "learner.steps=30"])
    folder = prepare_run_folder(first, "one")
    for step in (10, 20):
        saved = folder / "ckpt" / f"step_{step}"
        saved.mkdir(parents=True)
        state = LearnerState(step=step - 1, policy_version=step, skipped_steps=0, run=origin_of(folder))
        (saved / "state.json").write_text(json.dumps(asdict(state)))
        sealed.seal(saved)
    (folder / "ckpt" / "latest").symlink_to("step_20")
    return first, folder / "ckpt" / "step_20"


def test_a_damaged_checkpoint_is_judged_before_it_is_said_from_which_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, damaged = a_run_with_two_checkpoints(tmp_path)
    (damaged / "state.json").write_text("{")
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    assert local._run(replace(first, resume="auto"), [], ["asyncrl", "local"]) == 0
    said = capsys.readouterr().out
    assert "step_20/state.json has 1 bytes" in said and "A resume passes it over" in said
    assert "\nresumed from step 10\n" in said and "from step 20" not in said
    changed = replace(first, resume="auto", learner=replace(first.learner, lr=2e-6))
    assert resumed_lines(changed, damaged.parents[1], ["x"]) == ["# resumed from step_10: x"]
    with pytest.raises(CheckpointDamagedError, match=r"state\.json has 1 bytes"):
        local._run(replace(first, resume=str(damaged)), [], ["asyncrl", "local"])
    assert "resumed from" not in capsys.readouterr().out


def test_a_run_whose_folder_was_taken_away_says_so_and_not_how_to_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([*REQUIRED, f"run.dir={tmp_path / 'run'}"])
    away = f"import os; os.rename({str(tmp_path / 'run')!r}, {str(tmp_path / 'elsewhere')!r}); raise SystemExit(1)"
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=away))
    assert local._run(config, [], ["asyncrl", "local"]) == 1
    said = capsys.readouterr().out
    assert f"run.dir={tmp_path / 'run'} was moved away" in said and "Go on with" not in said


def test_a_resume_that_changes_settings_reads_its_checkpoint_once_before_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, newest = a_run_with_two_checkpoints(tmp_path)
    read: list[Path] = []
    monkeypatch.setattr(sealed, "verify", read.append)
    monkeypatch.setattr(local, "local_commands", lambda *_: roles(learner=FINE))
    changed = replace(first, resume="auto", learner=replace(first.learner, lr=2e-6))
    assert local._run(changed, [], ["asyncrl", "local"]) == 0
    assert read == [newest]
    begin_settings(changed, {})
    text = (newest.parents[1] / "config.yaml").read_text()
    assert text.startswith("# resumed from step_20: learner.lr: 1e-06 -> 2e-06\n")


def test_a_plan_of_a_resume_says_from_which_checkpoint_and_refuses_what_the_start_would(
    tmp_path: Path,
) -> None:
    first, newest = a_run_with_two_checkpoints(tmp_path)
    auto = replace(first, resume="auto")
    assert resume_lines(first, "local") == []
    assert resume_lines(auto, "local")[-1] == f"goes on from {newest}, of step 20"
    (newest / "state.json").write_text("{")
    for command in ("local", "learner"):
        said = resume_lines(auto, command)
        assert "step_20/state.json has 1 bytes" in said[0] and said[-1].endswith("step_10, of step 10")
        with pytest.raises(CheckpointDamagedError, match=r"state\.json has 1 bytes"):
            resume_lines(replace(first, resume=str(newest)), command)
    shutil.rmtree(newest.parent)
    begin_branch(newest.parent, tmp_path / "other" / "step_8", "other/step_8", "start")
    for command in ("local", "learner"):
        with pytest.raises(RunFolderError, match="Go on with resume=other/step_8; begin anew with overwrite=true"):
            resume_lines(auto, command)
    assert newest_proven(newest.parents[1], print) is None, "whoever only looks is told of none"


def test_the_rows_of_the_run_are_shown_while_it_goes_on(tmp_path: Path) -> None:
    row = json.dumps({"step": 1, "policy_version": 1, "reward/mean": 0.125})
    learner = f"open({str(tmp_path / 'metrics.jsonl')!r}, 'w').write({row!r} + chr(10))"
    code, out = run(roles(replay=FOREVER, rollout=FINE, learner=learner), tmp_path)
    assert code == 0
    assert "step 1 | version 1 | reward 0.125" in out


def test_the_report_leaves_curves_and_suggestions(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy_version": 1, "time": 1.0, "reward/mean": 0.5}\n')
    out = io.StringIO()
    show_report(
        load_config(REQUIRED), tmp_path, Console(file=out, width=300), ["asyncrl", "local", *REQUIRED], Ended(code=0)
    )
    assert (tmp_path / "curves.png").exists()
    assert "trained 1 steps to version 1" in out.getvalue()
    assert "asyncrl local model.path=m data.path=d.jsonl reward.function=r.py:f run.name=run-sync" in out.getvalue()


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (-1.7e308, 1.7e308)])
def test_a_report_that_cannot_be_drawn_says_so_and_does_not_hide_how_the_run_ended(
    rewards: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if max(rewards) < 1:
        monkeypatch.setattr(curves, "plot_curves", full)
    rows = [
        {"step": step, "policy_version": step, "time": 1.0, "reward/mean": each} for step, each in enumerate(rewards)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = io.StringIO()
    show_report(
        load_config(REQUIRED), tmp_path, Console(file=out, width=300), ["asyncrl", "local", *REQUIRED], Ended(code=0)
    )
    assert "not drawn" in out.getvalue() and "now try" in out.getvalue()


def test_every_role_gets_the_overrides_unchanged_plus_address_and_run_folder(tmp_path: Path) -> None:
    overrides = [*REQUIRED, "run.name='x'", f"run.dir={tmp_path}/a b"]
    commands = local_commands(load_config(overrides), overrides, "id")
    assert [command.role for command in commands] == ["replay", "rollout", "learner"]
    settings = [command.arguments[-len(overrides) - 1 :] for command in commands]
    assert settings[0] == settings[1] == settings[2]
    assert list(settings[0][: len(overrides) - 1]) == overrides[:-1]
    composed = load_config(settings[0])
    assert composed.run.dir == f"{tmp_path}/a b"
    assert composed.replay.address.startswith("tcp://127.0.0.1:")


def test_a_disk_without_room_for_the_journal_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda folder: free)
    config = load_config([*REQUIRED, "replay.journal.segment_mb=101"])
    with pytest.raises(RunFolderError, match=r"100 MiB free, .*segment_mb=101 MiB. Free space"):
        check_room(config, tmp_path)
    check_room(load_config([*REQUIRED, "replay.journal.segment_mb=100"]), tmp_path)
    free.free = 0
    check_room(load_config([*REQUIRED, "replay.durability=memory"]), tmp_path)
    (tmp_path / "journal").mkdir()
    check_room(config, tmp_path)  # a resume: its files have their room already


def test_two_local_runs_get_different_ports() -> None:
    addresses = {local_commands(load_config(REQUIRED), REQUIRED, "id")[0].arguments[-1] for _ in range(5)}
    assert len(addresses) > 1


def test_an_address_the_user_named_is_kept() -> None:
    overrides = [*REQUIRED, "replay.address=tcp://127.0.0.1:5577"]
    command = local_commands(load_config(overrides), overrides, "id")[0]
    assert [text for text in command.arguments if text.startswith("replay.address=")] == overrides[-1:]


def test_the_learner_runs_under_torchrun_with_restarts_and_a_rendezvous_on_loopback() -> None:
    config = load_config([*REQUIRED, "learner.ranks=2", "learner.max_restarts=5"])
    shown = str(learner_command(config, REQUIRED, "id7"))
    for part in (
        "python -m asyncrl.learner.torchrun",
        "--nproc-per-node=2",
        "--max-restarts=5",
        "--rdzv-id=id7",
        "--rdzv-backend=bound --rdzv-endpoint=127.0.0.1:0",
        "-m asyncrl.learner model.path=m",
    ):
        assert part in shown


@pytest.mark.parametrize(
    "path", ["/a/b.c-d_e", "/a b", "/a,b", "/it's", "/x(1)[2]{3}", "/a=b", "/back\\slash", "/$HOME"]
)
def test_a_quoted_path_survives_the_override_grammar(path: str) -> None:
    assert load_config([*REQUIRED, f"run.dir={quoted(path)}"]).run.dir == path
