"""Folders that are deleted when the process that made them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import IO, cast

import pytest

from asyncrl.storage.held import HELD, PREFIX, SHARED, clear_away, held_folder

HOLDS = """
import os
from asyncrl.storage.held import held_folder
with held_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_empty_its_owner_s_alone_and_gone_afterwards(temporary):
    with held_folder() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in folder.iterdir()] == [HELD]
        (folder / "left").touch()
    assert not list(temporary.iterdir())


def test_what_a_killed_process_left_is_cleared_away_and_what_another_uses_is_not(temporary):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        for _ in range(2)
    ]
    killed, lives = processes
    try:
        left, used = (Path(cast(IO[str], process.stdout).readline().strip()) for process in processes)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        begun = temporary / f"{PREFIX}begun"
        begun.mkdir()
        (begun / f"{HELD}.new").touch()  # of one that is being made
        clear_away()
        assert not left.exists() and used.exists() and begun.exists()
        lives.communicate("\n")
        assert not used.exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


SHARES = """
import mmap, os, sys
from pathlib import Path
from asyncrl.storage.held import held_folder, hold_shared, shared_by
files = [Path(name).open("w+b") for name in sys.argv[1:]]
for file in files:
    file.truncate(4096)
maps = [mmap.mmap(file.fileno(), 4096) for file in files]
with held_folder() as folder:
    hold_shared(folder, shared_by([os.getpid()], ("asyncrl_test_",)))
    print(folder, flush=True)
    input()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_the_memory_that_its_processes_shared_goes_with_it_and_none_of_another_s(temporary, killed):
    """A killed engine of several processes left 8 MB each time, until /dev/shm was full."""
    own, replaced, other = (Path("/dev/shm", f"{name}{uuid.uuid4().hex}") for name in ("asyncrl_test_",) * 2 + ("x_",))
    process = subprocess.Popen(
        [sys.executable, "-c", SHARES, *map(str, (own, replaced, other))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    try:
        folder = Path(cast(IO[str], process.stdout).readline().strip())
        assert set(json.loads((folder / SHARED).read_text())) == {own.name, replaced.name}
        replaced.rename(f"{replaced}_")
        replaced.touch()
        clear_away()
        assert own.exists(), "its owner lives"
        if killed:
            process.kill()
        process.communicate("\n")
        clear_away()
        assert not folder.exists() and not own.exists() and replaced.exists() and other.exists()
    finally:
        process.kill()
        process.communicate()
        for path in (own, replaced, Path(f"{replaced}_"), other):
            path.unlink(missing_ok=True)


def test_what_a_stranger_has_put_there_is_not_opened(temporary, monkeypatch):
    (temporary / f"{PREFIX}strange").mkdir()
    os.mkfifo(temporary / f"{PREFIX}strange" / HELD)  # who opens it waits for a writer
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with held_folder():
        assert (temporary / f"{PREFIX}strange").exists()
