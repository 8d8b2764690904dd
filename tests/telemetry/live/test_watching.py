"""`asyncrl watch`: what it shows of a run that another process started."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from asyncrl.cli.main import main
from asyncrl.cli.processes.supervisor import Supervisor
from asyncrl.plain_text import PlainStream
from asyncrl.storage.full_disk import BOARD_FILE, disk_full, make_board
from asyncrl.storage.occupancy import lived_in, living_in
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.live.over import ENDS_FILE
from asyncrl.telemetry.live.progress import Sparkline
from asyncrl.telemetry.live.tails import MetricsTail
from asyncrl.telemetry.live.watching import WatchView, in_run, sample_cells
from asyncrl.utils.process_tree import process_at
from asyncrl.utils.stopped_processes import kind_of
from tests.replay.helpers import Clock


@contextmanager
def started(like: str = "asyncrl.replay") -> Iterator[subprocess.Popen]:
    """A process that looks like a replay server or another, and does nothing until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", like],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # before it runs, the kernel may not know its command line yet
        yield process
    finally:
        process.kill()
        process.communicate()


def end(role: subprocess.Popen) -> list[psutil.Process]:
    """What is left of it: nothing."""
    role.kill()
    role.wait()
    return []


@pytest.fixture
def role() -> Iterator[subprocess.Popen]:
    with started() as process:
        yield process


def make_run(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("learner:\n  steps: 4\n")
    rows = [{"step": step, "time": 1.0, "time/step": 1.0, "reward/mean": 0.5} for step in (1, 2)]
    sample = {"step": 2, "reward": 1.0, "prompt": "one [red]two", "completion": "\x1b[2J\nthree"}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    alarm = {"name": "low_ess", "step": 2, "said": "small", "advice": "lower it"}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    return folder


def test_who_stands_still_is_named_and_who_dies_is_gone(tmp_path: Path, role: subprocess.Popen) -> None:
    clock, out = Clock(), io.StringIO()
    process = process_at(role.pid)
    assert process is not None
    living = [process]
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    with WatchView(make_run(tmp_path / "run"), 4, console, living=lambda _: living, now=clock) as view:
        assert view.look()
        os.kill(role.pid, signal.SIGSTOP)
        os.waitpid(role.pid, os.WUNTRACED)
        for _ in range(10):
            clock.now += 1
            assert view.look()
        console.print(*view.below(), sep="\n")
        shown = out.getvalue()
        assert f"everybody waits for the replay server (pid {role.pid}) since " in " ".join(shown.split())
        assert "until then nothing is admitted" in shown
        assert f"(pid {role.pid}) has been stopped" in shown and "stopped" in shown and "last step 0:10 ago" in shown
        assert "alarm low_ess at step 2: small" in shown
        assert "one [red]two" in shown and "three" in shown and "\x1b[2J\n" not in shown
        living = end(role)
        assert not view.look()
        out.truncate(0)
        console.print(*view.below(), sep="\n")
    assert f"(pid {role.pid}) has ended" in out.getvalue() and "Its last step was 2 of 4" in out.getvalue()


def test_the_board_shows_curves_queue_and_ages_and_how_long_the_run_still_takes(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "run"), io.StringIO()
    ages = {"replay/in_flight": 5.0, "replay/inserted": 9.0, "replay/leased": 4.0, "replay/inserted_age_2": 9.0}
    rows: list[dict[str, Any]] = [
        {"step": step, "time": 100.0 + 10 * step + 40_000 * (step > 6), "time/step": 10.0, "reward/mean": step / 8}
        | {"staleness/hist_1": 0.25, **ages}  # resumed after a night
        for step in range(1, 9)
    ]
    rows[-2] |= {"staleness/hist_6": 0.75, "replay/inserted_age_7": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    me = process_at(os.getpid())
    assert me is not None
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    with WatchView(folder, 20, console, living=lambda _: [me], now=Clock()) as view:
        view.look()
    shown = " ".join(out.getvalue().split())
    for part in (
        "step 8/20 trained for 1:20, last step 0:00 ago left 2:00",
        "1.000 ▁▂▃▄▅▆▇█",
        "by age 1: 25% queue",
        "5 groups in flight, 9 wait, 4 planned",
        "by age 2: 9",
    ):
        assert part in shown
    assert "6: 75%" not in shown and "7: 1" not in shown, "of the row before"


def test_a_curve_of_one_line_keeps_its_shape_however_long_or_large_it_is() -> None:
    huge = Sparkline()
    for value in (-1.7e308, 0.0, *[1.7e308] * (Sparkline.WIDE - 2)):
        huge.add(value)
    assert str(huge)[0] < str(huge)[1] < str(huge)[2] == str(huge)[-1] == "█"
    spark = Sparkline()
    assert str(spark) == ""
    spark.add(0.5)
    assert str(spark) == "▁"
    for step in range(100_000):
        spark.add(float(step))
    assert len(str(spark)) == Sparkline.WIDE and list(str(spark)) == sorted(str(spark)) and str(spark)[0::39] == "▁█"


def test_who_waits_is_on_a_small_terminal_whatever_else_there_is_to_show(
    tmp_path: Path, role: subprocess.Popen
) -> None:
    folder, out = make_run(tmp_path / "run"), io.StringIO()
    rows = [{"step": 1, "time": 1.0, f"eval/set{n}/accuracy": 0.5} for n in range(30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"step": 1, "time": 1.0}, *rows]))
    process = process_at(role.pid)
    assert process is not None
    console = Console(file=out, width=160, height=24, force_terminal=True, color_system=None)
    with WatchView(folder, 4, console, living=lambda _: [process]) as view:
        os.kill(role.pid, signal.SIGSTOP)
        os.waitpid(role.pid, os.WUNTRACED)
        view.look()
    assert f"everybody waits for the replay server (pid {role.pid}) since " in " ".join(out.getvalue().split())


def test_lines_say_once_who_waits_for_whom_until_another_of_its_kind_comes(
    tmp_path: Path, role: subprocess.Popen
) -> None:
    clock, out = Clock(), io.StringIO()
    server, me = process_at(role.pid), process_at(os.getpid())
    assert server is not None and me is not None
    living = [server, me]
    with WatchView(make_run(tmp_path / "run"), 4, Console(file=out), living=lambda _: living, now=clock) as view:
        view.look()
        living = [me, *end(role)]
        for _ in range(12):
            clock.now += 1
            view.look()
        waits = f"everybody waits for the replay server (pid {role.pid}) since "
        assert out.getvalue().count(waits) == 1 and "it ended and was not restarted yet" in out.getvalue()
        assert any(waits in str(line) for line in view.pressing())
        with started() as other:
            another = process_at(other.pid)
            assert another is not None
            living = [me, another]
            view.look()
        assert not any(waits in str(line) for line in view.pressing())


def test_nobody_waits_for_a_process_that_was_replaced_between_two_looks(tmp_path: Path) -> None:
    """Its successor came with the look that missed it, and it was waited for until the end of the run."""
    clock, out = Clock(), io.StringIO()
    with started("asyncrl.rollout --worker") as first, started("asyncrl.rollout --worker") as second:
        before, after = process_at(first.pid), process_at(second.pid)
        assert before is not None and after is not None
        living = [before]
        with WatchView(make_run(tmp_path / "run"), 4, Console(file=out), living=lambda _: living, now=clock) as view:
            view.look()
            end(first)
            living = [after]
            for _ in range(10):
                clock.now += 1
                view.look()
            assert not list(view.pressing())
    shown = " ".join(out.getvalue().split())
    assert f"a rollout worker (pid {first.pid}) has ended" in shown and "was not restarted yet" not in shown


def test_the_advice_rests_on_ten_steps_and_the_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as metrics:
        for step in range(3, 13):
            metrics.write(json.dumps({"step": step, "time": 1.0, "idle/learner": 0.6, "idle/rollout": 0.3}) + "\n")
    for bounds, shown in (((2, 4), True), (None, False)):
        with WatchView(run, 12, Console(file=io.StringIO()), bounds=bounds, living=lambda _: []) as view:
            view.look()
            said = [str(part) for part in view.below()]
        assert any("advice: the learner waits 60% and the rollouts 30%" in text for text in said) == shown


def test_when_no_worker_is_left_the_share_of_the_last_step_is_no_answer_to_who_waits(
    tmp_path: Path, role: subprocess.Popen
) -> None:
    """Of roles that were started one by one, it went on to say `nobody waits`."""
    run = make_run(tmp_path / "run")
    row = {"step": 3, "time": 1.0, "idle/learner": 0.0, "idle/rollout": 0.0}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")
    out = io.StringIO()
    console = Console(file=out, width=160)
    for like, waits in (("asyncrl.rollout --worker", "learner waits for"), ("asyncrl.learner", "rollouts wait for")):
        with started(like) as other:
            found = [process_at(role.pid), process_at(other.pid)]
            living = [each for each in found if each is not None]
            with WatchView(run, 4, console, living=lambda _, there=living: there) as view:
                assert view.look() and view.who_waits() == "nobody waits"
                del living[1:]
                end(other)
                assert view.look() and waits in view.who_waits() and "runs on this machine" in view.who_waits()
                living.clear()
                view.look()
                assert view.who_waits() == "nobody waits"  # in the last step of a run that is over


def test_torchrun_whose_ranks_have_died_is_there_and_the_run_goes_on(tmp_path: Path) -> None:
    """It holds no lock, and is found by its ranks."""
    out = io.StringIO()
    with started("asyncrl.learner.torchrun") as launcher, started("asyncrl.sft") as rank:
        torchrun, each = process_at(launcher.pid), process_at(rank.pid)
        assert torchrun is not None and each is not None
        living = [torchrun, each]
        with WatchView(make_run(tmp_path / "run"), 4, Console(file=out), living=lambda _: living) as view:
            view.look()
            living = end(rank)
            assert view.look()
            waits = list(map(str, view.pressing()))
            assert [line.partition(" since")[0] for line in waits] == [
                f"the run waits for a learner rank (pid {rank.pid})"
            ]
            end(launcher)
            assert not view.look()


@pytest.mark.parametrize(
    ("command", "called"),
    [
        ("python -u -m asyncrl.sft model.path=DIR", "a learner rank"),
        ("python /venv/bin/asyncrl sft model.path=DIR", "asyncrl sft"),
        ("python -m asyncrl.cli sft model.path=DIR", "asyncrl sft"),
        ("python -m asyncrl.learner.torchrun --nnodes=1 -m asyncrl.sft", "torchrun"),
        ("/ray/core/src/ray/gcs/gcs_server --log_dir=DIR", "Ray's gcs_server"),
    ],
)
def test_whose_command_line_it_is_and_who_waits_for_it(command: str, called: str) -> None:
    kind = kind_of(command.split())
    assert kind is not None and kind.name == called
    assert bool(kind.waits) == (called in ("a learner rank", "Ray's gcs_server"))


def test_nobody_waits_for_those_that_are_gone_when_the_run_ends(tmp_path: Path, role: subprocess.Popen) -> None:
    server, me = process_at(role.pid), process_at(os.getpid())
    assert server is not None and me is not None
    living, folder = [server, me], make_run(tmp_path / "run")
    with WatchView(folder, 4, Console(file=io.StringIO()), living=lambda _: living) as view:
        view.look()
        living = [me, *end(role)]
        with Supervisor(folder / "logs") as supervisor:
            view.look()
            assert any("everybody waits for" in str(line) for line in view.pressing())
            supervisor.note_end()
            view.look()
            assert not any("everybody waits for" in str(line) for line in view.pressing())


def test_the_notice_of_a_full_disk_is_shown_once(tmp_path: Path) -> None:
    clock, out, folder = Clock(), io.StringIO(), make_run(tmp_path / "run")
    me = process_at(os.getpid())
    assert me is not None
    make_board(folder / "logs" / BOARD_FILE)
    with WatchView(folder, 4, Console(file=out, width=200), living=lambda _: [me], now=clock) as view:
        view.look()
        disk_full(folder / "metrics.jsonl", 7)
        for _ in range(3):
            view.look()
    assert out.getvalue().count("metrics.jsonl needs 7 bytes") == 1


def test_the_view_draws_on_a_terminal_whose_stream_lets_only_plain_text_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", PlainStream(terminal))
    console = PlainConsole(force_terminal=True, width=100, color_system=None)
    with WatchView(make_run(tmp_path / "run"), 4, console, living=lambda _: []) as view:
        view.look()
        view.look()
    drawn = terminal.getvalue()
    assert "\x1b[" in drawn and "\\x1b[2K" not in drawn, "commands to the terminal are none of the text"
    assert "\x1b[2J" not in drawn, "and those in a completion are nothing else"


def test_those_that_hold_the_lock_of_a_folder_live_in_it(tmp_path: Path) -> None:
    assert os.getpid() not in [process.pid for process in living_in(tmp_path)]
    with lived_in(tmp_path):
        assert os.getpid() in [process.pid for process in living_in(tmp_path)]


def test_a_process_that_somebody_waits_for_is_seen_though_it_holds_no_lock(tmp_path: Path) -> None:
    out = io.StringIO()
    with started("asyncrl.rewards.child") as reward, started("ray::IDLE") as idle, lived_in(tmp_path):
        assert idle.pid not in [process.pid for process in in_run(tmp_path)], "nobody waits for it"
        with WatchView(make_run(tmp_path / "run"), 4, Console(file=out), living=lambda _: in_run(tmp_path)) as view:
            os.kill(reward.pid, signal.SIGSTOP)
            os.waitpid(reward.pid, os.WUNTRACED)
            view.look()
            waits = f"what it scores waits for a reward process (pid {reward.pid}) since "
            assert any(waits in str(line) for line in view.pressing())


def test_of_a_run_that_is_over_it_tells_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(make_run(tmp_path / "run"))]) == 0
    said = capsys.readouterr().out
    assert "step 2 | reward 0.500" in said and "low_ess" in said and "three" in said
    assert main(["watch", str(tmp_path)]) == 2


def test_what_it_says_of_a_run_that_is_over_stays_on_a_small_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was printed above a table that was higher than the terminal, and scrolled away when that was erased."""
    small = partial(PlainConsole, force_terminal=True, width=100, height=24, color_system=None)
    monkeypatch.setattr("asyncrl.cli.watch.PlainConsole", small)
    folder = make_run(tmp_path / "run")
    rows = [{"step": 1, "time": 1.0, f"eval/set{n}/accuracy": 0.5} for n in range(30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"step": 1, "time": 1.0}, *rows]))
    assert main(["watch", str(folder)]) == 0
    out = capsys.readouterr().out
    erased = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", out)
    assert erased and max(len(each) for each in erased) <= 24 * len("\x1b[1A\x1b[2K")
    assert "Its last step was 1" in out.rpartition("\x1b[2K")[2]


def test_a_run_that_may_go_on_on_another_machine_is_not_called_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    for age, elsewhere in ((5.0, True), (500.0, False)):
        for file in folder.glob("*.jsonl"):
            os.utime(file, (time.time() - age, time.time() - age))
        assert main(["watch", str(folder)]) == 0
        said = capsys.readouterr().out
        assert ("files were written 0:05 ago. If it runs on other machines" in said) == elsewhere
        assert ("this run has ended" in said) != elsewhere and "Its last step was 2" in said


@pytest.mark.parametrize("settings", ["learner: {steps: x}", "telemetry: {ignore_alarms: [later]}", "telemetry: 5"])
def test_settings_of_another_version_or_hand_keep_nobody_from_looking(
    settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(f"{settings}\n")
    assert main(["watch", str(folder)]) == 0
    assert "step 2 | reward 0.500" in capsys.readouterr().out


def test_of_samples_the_last_are_read_however_many_there_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    file = folder / "samples.jsonl"
    file.write_text("".join(json.dumps({"step": step, "completion": "x" * (1 << 20)}) + "\n" for step in range(1, 9)))
    assert [row["step"] for row in MetricsTail(file, 2.5 * (1 << 20)).read()] == [7, 8]
    assert len(MetricsTail(file).read()) == 8
    with WatchView(folder, 4, Console(file=io.StringIO()), living=lambda _: []) as view:
        view.look()
        assert [row["step"] for row in view._samples] == [6, 7, 8]


def test_of_a_run_that_is_over_it_says_how_its_roles_ended_and_which_step_was_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    with Supervisor(folder / "logs") as supervisor:
        supervisor.start("replay", [sys.executable, "-c", "import time; time.sleep(600)"], {})
        learner = supervisor.start(
            "learner", [sys.executable, "-c", "print('rank: NonFiniteError: no numbers\\nbye'); exit(3)"], {}
        )
        learner.process.wait()
    (folder / "logs" / "rollout-0.log").touch()
    assert main(["watch", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Its last step was 2 of 4, at 1970-01-01" in said and "not finished: resume=auto continues" in said
    assert "the replay server ended: signal SIGTERM, stopped at the end of the run 20" in said
    assert "torchrun, the learner ended: exit code 3 20" in said and "rollout worker 0 ended with the pool" in said
    assert "torchrun, the learner: rank: NonFiniteError: no numbers" in said
    (folder / "logs" / ENDS_FILE).write_text('{"learner": [')
    assert main(["watch", str(folder)]) == 0
    assert "ended; how was not recorded" in capsys.readouterr().out


def test_of_a_group_that_was_dropped_a_sample_says_why_and_nothing_of_what_it_does_not_have() -> None:
    dropped = {"step": 3, "prompt": "p", "dropped": "failed_reward", "detail": "TypeError: 7"}
    assert sample_cells(dropped) == ["3", "", "p", "[failed_reward: TypeError: 7] "]
    assert sample_cells({"step": 3, "reward": 0.5, "prompt": "p", "completion": "c"}) == ["3", "0.5", "p", "c"]


def test_a_pipe_hears_what_a_run_waits_for_before_its_first_step(tmp_path: Path) -> None:
    folder, out, clock = make_run(tmp_path / "run"), io.StringIO(), Clock()
    (folder / "metrics.jsonl").write_text("")
    (folder / "logs" / "learner.log").write_text("torch is loaded\nloading the model\n\n")
    me = process_at(os.getpid())
    assert me is not None
    with WatchView(folder, 4, Console(file=out, width=400), living=lambda _: [me], now=clock) as view:
        assert view.look()
        said = out.getvalue()
        assert "no step is trained yet" in said and "waits for a rollout worker and a learner rank to start" in said
        assert "learner: loading the model" in said
        for _ in range(60):
            clock.now += 1
            assert view.look()
        assert out.getvalue().count("no step is trained yet") == 4, "at once, after 15, 30 and 60 s"
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "reward/mean": 0.5}) + "\n")
        for _ in range(200):
            clock.now += 1
            assert view.look()
    assert out.getvalue().count("no step is trained yet") == 4
