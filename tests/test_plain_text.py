"""Foreign text is shown, but never interpreted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from asyncrl.cli.processes.supervision import show_failure
from asyncrl.cli.processes.supervisor import Role
from asyncrl.plain_text import PlainStream, plain
from asyncrl.telemetry.live.console import PlainConsole
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.tails import REWARD_WARNING

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rgone\u202etxt.exe\x7f"


def obeyed(text: str) -> set[str]:
    """What a terminal would act on."""
    return {letter for letter in text if letter not in "\n\t" and (not letter.isprintable() or ord(letter) == 0x9B)}


def test_what_a_terminal_obeys_is_written_out_and_the_rest_is_left() -> None:
    assert plain(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\x9b31m\rgone\u202etxt.exe\x7f"
    assert plain("a\tb\nc\r\nd äß漢字 👩\u200d🔬 ") == "a\tb\nc\nd äß漢字 👩\u200d🔬 "
    assert plain("\ud83d") == r"\ud83d"
    every = "".join(map(chr, range(0x3000)))
    assert not obeyed(plain(every)) & set(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066, 0x2028)))


def test_a_stream_is_plain_and_else_itself(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        stream = PlainStream(file)
        print(HOSTILE, file=cast(TextIO, stream), flush=True)
        assert stream.fileno() == file.fileno() and not stream.isatty()
    assert (tmp_path / "log").read_text() == plain(HOSTILE) + "\n"


PROGRAM = """
import logging, sys, warnings
from asyncrl.plain_text import make_streams_plain

hostile = sys.argv[1]
make_streams_plain()
make_streams_plain()
logging.basicConfig()
print(hostile)
logging.warning("a peer called %s", hostile)
warnings.warn(hostile)
sys.stderr.writelines([hostile, "\\n"])
raise ValueError(hostile)
"""


def test_prints_logs_warnings_and_what_ends_a_process_are_plain() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, HOSTILE], capture_output=True, text=True, timeout=120)
    assert done.stdout == plain(HOSTILE) + "\n"
    assert done.stderr.count(plain(HOSTILE)) == 4 and not obeyed(done.stderr)


def test_the_console_draws_with_sequences_of_its_own_alone(tmp_path: Path) -> None:
    shown = io.StringIO()
    console = PlainConsole(file=shown, force_terminal=True, width=300)
    logs = tmp_path / "logs"
    logs.mkdir()
    with RunView(tmp_path, 10, console) as view:
        (logs / "rollout-0.log").write_text(f"{REWARD_WARNING}reward failed: {HOSTILE}\n", newline="")
        view.refresh()
    log = logs / "learner.log"
    log.write_text(f"ValueError: {HOSTILE}\n", newline="")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
        show_failure(Role("learner", process, log), console)
    assert shown.getvalue().count(r"\x1b]0;owned\x07\x1b[2J") == 2
    assert "\x1b]" not in shown.getvalue() and "\x1b[2J" not in shown.getvalue() and "\x9b" not in shown.getvalue()


def test_rich_still_draws_where_a_process_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.StringIO()
    monkeypatch.setattr(sys, "stdout", PlainStream(raw))
    Console(force_terminal=True, color_system="standard").print("[bold]role[/bold]")
    assert "\x1b[1mrole" in raw.getvalue()


ENTRIES = ("asyncrl local", "asyncrl.replay", "asyncrl.rollout")
WITH_TORCH = ("asyncrl.learner", "asyncrl.cli.rerun")


@pytest.mark.parametrize(
    "entry", [*ENTRIES, *(pytest.param(each, marks=pytest.mark.slow) for each in WITH_TORCH)], ids=lambda entry: entry
)
@pytest.mark.timeout(300)
def test_every_process_refuses_a_setting_in_plain_text(entry: str) -> None:
    command = [sys.executable, "-m", *entry.split(), f"run.name={HOSTILE}", "loss=ppo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode != 0 and "owned" in done.stderr
    assert not obeyed(done.stdout + done.stderr)


def test_a_character_that_the_terminal_s_encoding_lacks_is_written_out():
    """`asyncrl sft --dry-run` ended with a UnicodeEncodeError at its histogram."""
    code = "from asyncrl.plain_text import make_streams_plain; make_streams_plain(); print('\\u2588 \\u25b6 \\xfc')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"\\u2588 \\u25b6 \xfc\n"), done.stderr
