"""Streams of a process keep working whatever is behind their descriptors, and whenever that changes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SWAPPED = """
import logging, os, sys
from asyncrl.plain_text import make_streams_plain
from asyncrl.storage.log_stream import take_pipes

print("early", end="")  # in the buffer while the descriptors change
order = sys.argv[1]
if order == "plain first":
    make_streams_plain()
given, answers = take_pipes()
if order == "plain last":
    make_streams_plain()
print("printed \\x1b[2J")
print("told", file=sys.stderr)
logging.warning("logged")
os.system("echo child")
sys.stdout.flush()
os.write(answers, b"answer")
"""


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptor for a child, and the one that reads what it wrote (-1: nothing can be read)."""
    if kind == "pty":
        reader, writer = pty.openpty()
    elif kind == "pipe":
        reader, writer = os.pipe()
    elif kind == "file":
        writer, reader = os.open(folder / "log", os.O_WRONLY | os.O_CREAT), os.open(folder / "log", os.O_RDONLY)
    else:
        writer, reader = os.open(os.devnull, os.O_RDWR), -1
    try:
        yield writer, reader
    finally:
        for descriptor in {writer, reader} - {-1}:
            os.close(descriptor)


def run(command: list[str], folder: Path, stdout: str, stderr: str, **more: Any) -> tuple[int, str, str]:
    """Run a short program; return its exit code and what it wrote to both streams."""
    (folder / "out").mkdir(exist_ok=True)
    with opened(stdout, folder / "out") as (out, read_out), opened(stderr, folder) as (error, read_error):
        done = subprocess.run(command, stdout=out, stderr=error, stdin=subprocess.DEVNULL, timeout=120, **more)
        return done.returncode, written(read_out), written(read_error)


def written(reader: int) -> str:
    """What is in a file, pipe or terminal by now."""
    if reader < 0:
        return ""
    os.set_blocking(reader, False)
    try:
        return os.read(reader, 1 << 16).decode().replace("\r\n", "\n")
    except BlockingIOError:
        return ""


@pytest.mark.parametrize("order", ["plain first", "plain last"])
@pytest.mark.parametrize("stderr", ["pipe", "pty", "file"])
@pytest.mark.parametrize("stdout", ["null", "pipe", "file"])
def test_streams_write_after_their_descriptors_were_swapped(
    tmp_path: Path, stdout: str, stderr: str, order: str
) -> None:
    code, answer, log = run([sys.executable, "-c", SWAPPED, order], tmp_path, stdout, stderr)
    assert code == 0, log
    assert log.replace("early", "").splitlines() == [r"printed \x1b[2J", "told", "WARNING:root:logged", "child"]
    assert stdout == "null" or answer.removeprefix("early") == "answer"


@pytest.mark.slow
@pytest.mark.parametrize("stderr", ["pipe", "pty"])
def test_the_process_of_the_tools_starts_on_a_pipe_and_a_terminal(tmp_path: Path, stderr: str) -> None:
    tools = Path(__file__).parents[1] / "environments" / "toolset.py"
    program = (
        "import sys\nfrom asyncrl.environments.tools.sessions import ToolHost\n"
        "host = ToolHost([sys.argv[1]])\nprint(len(host.specs))\nhost.close()\n"
    )
    code, out, log = run([sys.executable, "-c", program, f"{tools}:add"], tmp_path, "pipe", stderr)
    assert (code, out) == (0, "1\n"), log
