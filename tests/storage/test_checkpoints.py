"""From which checkpoint a resume continues: viewers and the learner give the same answer."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError, DiskFullError
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import begin_branch, branch_begun, chosen, newest, newest_whole, prune, trained_steps


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for steps in (8, 20):
        saved = tmp_path / "ckpt" / f"step_{steps}"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text(f'{{"step": {steps - 1}, "policy_version": {steps}}}')
    (tmp_path / "ckpt" / "latest").symlink_to("step_8")
    return tmp_path


def test_the_setting_decides_and_a_missing_link_is_the_checkpoint_of_the_most_steps(run_dir: Path) -> None:
    ckpt = run_dir / "ckpt"
    assert chosen(run_dir, "never") is None and trained_steps(None) == 0
    assert chosen(run_dir, "auto") == ckpt / "step_8"
    assert chosen(run_dir, str(ckpt / "step_20")) == ckpt / "step_20"
    (ckpt / "latest").unlink()
    found = chosen(run_dir, "auto")
    assert found == newest(ckpt)[0] == ckpt / "step_20" and trained_steps(found) == 20
    assert "latest is missing: continuing from step_20" in newest(ckpt)[1]
    for other in ("step_33", ".", "../elsewhere", str(run_dir)):
        (ckpt / "latest").unlink(missing_ok=True)
        (ckpt / "latest").symlink_to(other)
        assert trained_steps(chosen(run_dir, "auto")) == 20
        assert f"latest points to {other}, which does not exist" in newest(ckpt)[1]


@pytest.mark.parametrize("form", ["step_8", "./step_8", "../ckpt/step_8", "{ckpt}/step_8"])
@pytest.mark.parametrize("by", ["absolute", "relative"])
def test_a_link_is_followed_however_the_user_wrote_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, form: str, by: str
) -> None:
    (run_dir / "ckpt" / "latest").unlink()
    (run_dir / "ckpt" / "latest").symlink_to(form.format(ckpt=run_dir / "ckpt"))
    monkeypatch.chdir(run_dir)
    folder = run_dir / "ckpt" if by == "absolute" else Path("ckpt")
    assert newest(folder) == (folder / "step_8", "")


def test_a_run_that_began_from_a_copy_with_a_name_of_its_own_and_died_goes_on_from_that(run_dir: Path) -> None:
    ckpt = run_dir / "ckpt"
    shutil.copytree(ckpt / "step_20", ckpt / "step_20_good")
    (ckpt / "step_9").mkdir()
    (ckpt / "step_9" / "state.json").write_text('{"step": 8, "policy_version": 9}')
    assert begin_branch(ckpt, ckpt / "step_20_good", "ckpt/step_20_good", "one") == []
    assert newest(ckpt) == (ckpt / "step_20_good", "")
    for name in ("step_9", "step_20_good"):
        sealed.seal(ckpt / name)
    (ckpt / "step_20_good" / "more").touch()
    whole, damaged, _ = newest_whole(ckpt)
    assert whole == ckpt / "step_9" and [path.name for path, _ in damaged] == ["step_20_good"]


def test_copies_that_a_user_put_beside_the_checkpoints_push_none_of_them_out_and_stay(run_dir: Path) -> None:
    ckpt = run_dir / "ckpt"
    for name in ("step_6", "step_200", "step_08", "step_8_good", "step_8.bak"):
        shutil.copytree(ckpt / "step_8", ckpt / name)
    prune(ckpt, ckpt / "step_20", 2)
    assert {path.name for path in ckpt.iterdir()} == {
        *("latest", "step_20", "step_8", "step_6.tmp"),
        *("step_200", "step_08", "step_8_good", "step_8.bak"),
    }


def test_a_checkpoint_that_does_not_say_is_refused_by_its_file_with_the_way_out(run_dir: Path) -> None:
    state = run_dir / "ckpt" / "step_8" / "state.json"
    for damaged in ("{", "[]", '{"step": 7}'):
        state.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"step_8/state\.json cannot be read.*resume=PATH"):
            trained_steps(chosen(run_dir, "auto"))


def test_a_branch_that_finds_no_space_has_not_begun_and_begins_when_there_is(tmp_path: Path, monkeypatch):
    (tmp_path / "ckpt").mkdir()

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(DiskFullError, match=r"branch\.json needs"):
        patched.setattr(sealed, "replace_text", full)
        begin_branch(tmp_path / "ckpt", tmp_path / "elsewhere", "elsewhere", "start")
    assert not branch_begun(tmp_path / "ckpt", "elsewhere", "start")
    begin_branch(tmp_path / "ckpt", tmp_path / "elsewhere", "elsewhere", "start")
    assert branch_begun(tmp_path / "ckpt", "elsewhere", "start")


def test_a_checkpoint_that_its_run_deletes_while_it_is_looked_at_is_not_a_damaged_one(run_dir: Path, monkeypatch):
    ckpt = run_dir / "ckpt"
    for path in (ckpt / "step_8", ckpt / "step_20"):
        sealed.seal(path)

    verify = sealed.verify

    def slow(path: Path) -> None:
        if path.name == "step_8":
            sealed.point(ckpt / "latest", ckpt / "step_20")
            sealed.remove(path)
        verify(path)

    monkeypatch.setattr(sealed, "verify", slow)
    assert newest_whole(ckpt) == (ckpt / "step_20", [], "")


def test_a_line_that_is_gone_on_from_again_keeps_none_of_the_other_one_and_falls_back_on_its_own(run_dir: Path) -> None:
    """Steps 8 and 20 were trained, then 9 to 20 once more: from version 30."""
    ckpt = run_dir / "ckpt"
    assert begin_branch(ckpt, ckpt / "step_8", "ckpt/step_8", "one") == [("step_20", "left_step_20")]
    for steps, version in ((12, 34), (20, 42)):
        (ckpt / f"step_{steps}").mkdir()
        (ckpt / f"step_{steps}" / "state.json").write_text(f'{{"step": {steps - 1}, "policy_version": {version}}}')
    left = begin_branch(ckpt, ckpt / "left_step_20", "ckpt/left_step_20", "two")
    assert left == [("step_12", "left_step_12"), ("step_20", "left_step_20_2")]
    for name in ("step_8", "left_step_20"):
        sealed.seal(ckpt / name)
    assert newest_whole(ckpt)[0] == ckpt / "left_step_20"
    (ckpt / "left_step_20" / "state.json").write_text("{")
    whole, damaged, _ = newest_whole(ckpt)
    assert whole == ckpt / "step_8" and [path.name for path, _ in damaged] == ["left_step_20"]
