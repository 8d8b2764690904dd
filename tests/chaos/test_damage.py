"""Damage to a run folder is refused by name, reported, or harmless."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.main import main
from asyncrl.cli.starting.folder_check import examine, refuse_damaged, tell
from asyncrl.errors import RunFolderError
from asyncrl.learner.checkpoints.resume import highest_version
from asyncrl.replay.audit.report import audit, table
from asyncrl.replay.journal.recovery import read_journal

from . import damage
from .recorded import STEPS, opened, record, resume

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was killed two steps after its last checkpoint."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record(folder, finished=False)
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@contextmanager
def unprivileged(folder: Path) -> Iterator[Path]:
    """A copy of the folder and the rights of its owner alone: root may read everything."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        copy = shutil.copytree(folder, Path(parent, "run"), symlinks=True)
        if os.geteuid() != 0:
            yield copy
            return
        for path in (copy, *copy.rglob("*")):
            os.chown(path, nobody, nobody, follow_symlinks=False)
        os.seteuid(nobody)
        try:
            yield copy
        finally:
            os.seteuid(0)


def newest_segment(folder: Path) -> Path:
    return max((folder / "journal").glob("*.seg"))


@pytest.mark.slow
def test_no_random_damage_is_silent(tmp_path: Path) -> None:
    ends, silent = damage.run(40, 1, tmp_path)
    assert not silent, "\n".join(silent)
    assert sum(ends.values()) == 40 and len({end.partition(": ")[2] for end in ends}) > 1


def test_an_undamaged_folder_has_nothing_to_tell(folder: Path) -> None:
    found = examine(folder)
    assert not found.refusals and not found.notes


@pytest.mark.parametrize("share", [0.07, 0.5])
def test_a_journal_that_lost_its_end_is_refused_by_the_resume_and_by_the_audit(
    folder: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = newest_segment(folder)
    used = len(path.read_bytes().rstrip(b"\0"))
    with path.open("r+b") as file:
        file.truncate(int(used * (1 - share)))
    (refusal,) = examine(folder).refusals
    assert path.name in refusal and "truncated" in refusal and "move the journal folder away" in refusal
    assert tell(folder) == 1
    assert "CONTRADICTION" in capsys.readouterr().err
    assert main(["audit", str(folder)]) == 2
    assert capsys.readouterr().err.count(refusal) == 1


def test_a_journal_of_an_earlier_day_is_refused_because_metrics_and_checkpoint_know_more(
    folder: Path, recorded: Path, tmp_path: Path
) -> None:
    shutil.rmtree(folder / "journal")
    short = tmp_path / "short"
    core = opened(short)
    core.core.restore(step=None, policy_version=-1, snapshot=None, incarnation="l1")
    core.core.publish(policy_version=0, parent=-1)
    core.journal.close()
    shutil.copytree(short / "journal", folder / "journal")
    refusals = "\n".join(examine(folder).refusals)
    assert "ends at step 0, version 0" in refusals
    assert f"metrics.jsonl has version {STEPS}" in refusals and "checkpoint is of step 6" in refusals


def test_after_the_documented_repair_it_is_said_and_no_version_is_used_twice(folder: Path) -> None:
    shutil.rmtree(folder / "journal")
    assert highest_version(folder) == STEPS  # that of the checkpoint is 6
    (note,) = examine(folder).notes
    assert "unverified" in note and "step 6" in note
    resume(folder, lambda _: None)
    found = audit(read_journal(folder / "journal"))
    assert found.on_trust_from == 6
    assert "from the checkpoint of step 6, unverified" in table(found)


def test_a_missing_link_is_told(folder: Path) -> None:
    (folder / "ckpt" / "latest").unlink()
    assert "latest is missing: continuing from step_6" in "\n".join(examine(folder).notes)


def test_without_its_checkpoints_a_run_goes_on_from_a_copy_that_is_named_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder / "ckpt")
    with pytest.raises(RunFolderError, match=r"there is none in .*ckpt, so resume=auto has nothing to continue from"):
        refuse_damaged(folder, "auto", print)
    assert refuse_damaged(folder, "copy/step_6", print) is None
    assert tell(folder) == 0 and "nothing to continue from" in capsys.readouterr().err


def test_a_line_of_the_ledger_that_was_changed_or_is_gone_is_told(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert "ledger.jsonl: line 3 was changed after it was written, or the line before it is gone" in "".join(
        examine(folder).notes
    )


@pytest.mark.parametrize("end", [b"", b"learner:\n"])
def test_settings_that_were_cut_or_changed_by_hand_are_told(folder: Path, end: bytes) -> None:
    path = folder / "config.yaml"
    path.write_bytes(path.read_bytes()[:146] + end)
    assert [note for note in examine(folder).notes if f"{path} was changed or truncated" in note]


def test_a_run_folder_without_its_run_file_or_its_ledger_is_told_of(folder: Path) -> None:
    """The audit of it said `balances`, and nothing else."""
    (folder / "config.yaml").write_text("learner:\n  steps: 4\n")
    (folder / "run.json").write_text("{")
    (folder / "ledger.jsonl").unlink()
    notes = "\n".join(examine(folder).notes)
    assert "run.json is missing or damaged" in notes and "ledger.jsonl is missing: a resume writes" in notes


@pytest.mark.parametrize("name", ["manifest.json", "the largest"])
def test_a_checkpoint_that_cannot_be_opened_is_not_damaged_and_no_resume_goes_back_behind_it(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put aside, or the advice was `begin anew with overwrite=true`."""
    newest, opened_as = (folder / "ckpt" / "latest").resolve(), Path.open
    refused = newest / name if name == "manifest.json" else max(newest.iterdir(), key=lambda file: file.stat().st_size)

    def not_for_this_user(path: Path, *given: Any, **more: Any) -> Any:
        if path.resolve() == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return opened_as(path, *given, **more)

    monkeypatch.setattr(Path, "open", not_for_this_user)
    monkeypatch.setattr(Path, "read_bytes", lambda path: path.open("rb").read())
    monkeypatch.setattr(Path, "read_text", lambda path, *_: path.open().read())
    found = examine(folder)
    assert [said for said in found.unread if "Permission denied" in said] and not found.bare
    assert not [said for said in found.notes if "passes it over" in said or "goes back" in said]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "ckpt/latest/state.json", "config.yaml", "run.json"])
def test_a_file_that_may_not_be_read_is_named_and_no_contradiction(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tell(folder) == 0
    with unprivileged(folder) as copy:
        path = (copy / name).resolve()
        path.chmod(0)
        assert main(["audit", str(copy)]) == 2
        with pytest.raises(RunFolderError, match=f"{path.name} cannot be read: Permission denied"):
            refuse_damaged(copy, "auto", print)
    told = capsys.readouterr().err
    assert f"NOT CHECKED: {path} cannot be read: Permission denied. Ask its owner" in told
    assert "CONTRADICTION" not in told


def test_a_journal_that_may_not_be_read_is_said_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unprivileged(folder) as copy:
        path = newest_segment(copy)
        path.chmod(0)
        assert main(["audit", str(copy)]) == 2
    assert capsys.readouterr().err.count(f"{path} cannot be read: Permission denied") == 1
