"""Two runs in one folder, and two learners of one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.errors import RunFolderError
from asyncrl.storage import occupancy
from asyncrl.telemetry.folder.run_folder import owner_of, prepare_run_folder
from asyncrl.telemetry.folder.tenants import occupied, sole_learner
from tests.telemetry.folder.test_run_folder import config_for

LEARNER = """
import os, sys, time
from pathlib import Path
from asyncrl.config import load_config
from asyncrl.telemetry.folder.run_folder import prepare_run_folder
from asyncrl.telemetry.folder.tenants import sole_learner
config = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f", *sys.argv[3:]])
config.run.dir = sys.argv[1]
with sole_learner(config):
    prepare_run_folder(config, "one")
    child = os.fork() if sys.argv[2] == "forks" else 0
    if sys.argv[2] != "forks" or child:
        print("holds", child, flush=True)
    time.sleep(600)
"""


@contextmanager
def learner_in(folder: Path, kind: str = "alone", *settings: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the folder as a learner does, and the pid of its child, 0 if it has none."""
    command = [sys.executable, "-c", LEARNER, str(folder), kind, *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    held, child = process.stdout.readline().split()
    assert held == "holds"
    try:
        yield process, int(child)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if int(child):
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("setting", ["overwrite=true", "resume=auto", "seed=0"])
def test_a_second_run_cannot_begin_in_the_folder_of_one_that_goes_on(setting: str, tmp_path: Path) -> None:
    with occupied(config_for(tmp_path / "a")):
        prepare_run_folder(config_for(tmp_path / "a"), "one")
        with pytest.raises(RunFolderError, match="in progress"), occupied(config_for(tmp_path / "a", setting)):
            pass
        with occupied(config_for(tmp_path / "b")):
            assert (tmp_path / "a" / "run.json").exists()
    with occupied(config_for(tmp_path / "a", setting)):
        prepare_run_folder(config_for(tmp_path / "a", "overwrite=true"), "two")


@pytest.mark.parametrize("setting", ["overwrite=true", "resume=auto", "seed=0"])
def test_a_second_learner_is_refused_while_the_first_lives_and_changes_nothing(setting: str, tmp_path: Path) -> None:
    config = config_for(tmp_path / "a", setting)
    with learner_in(tmp_path / "a") as (first, _):
        with (
            pytest.raises(RunFolderError, match=rf"pid {first.pid}\. .*`kill -INT {first.pid}`.* resume=auto"),
            sole_learner(config),
        ):
            pass
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(RunFolderError, match=f"after `kill -CONT {first.pid}`"), sole_learner(config):
            pass
        assert owner_of(tmp_path / "a") == "one"
        with sole_learner(config_for(tmp_path / "b")):
            pass
        first.kill()  # and at once, before anybody has waited for it
        with sole_learner(config):
            pass


def test_a_learner_that_has_cleared_its_folder_still_holds_it(tmp_path: Path) -> None:
    prepare_run_folder(config_for(tmp_path / "a"), "earlier")
    (tmp_path / "a" / "logs" / "learner.log").touch()
    with (
        learner_in(tmp_path / "a", "alone", "overwrite=true"),
        pytest.raises(RunFolderError, match="a learner that is alive"),
        sole_learner(config_for(tmp_path / "a")),
    ):
        pass
    assert not (tmp_path / "a" / "logs" / "learner.log").exists()


def test_who_only_inherited_the_lock_of_a_dead_learner_keeps_nobody_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "ENDS_S", 0.3)
    with learner_in(tmp_path / "a", "forks") as (first, child):
        first.kill()
        first.wait()
        with sole_learner(config_for(tmp_path / "a", "resume=auto")):
            os.kill(child, 0)


def test_a_learner_leaves_a_folder_alone_that_is_none_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunFolderError, match="is not a run folder"), sole_learner(config_for(tmp_path)):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
