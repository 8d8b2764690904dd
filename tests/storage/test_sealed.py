from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.storage import sealed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step_1"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "inner" / "more").write_bytes(b"abc")
    sealed.seal(folder)
    return folder


def test_what_was_sealed_verifies(folder: Path):
    sealed.verify(folder)


def test_a_file_cut_short_is_named(folder: Path):
    (folder / "weights").write_bytes(b"01234")
    with pytest.raises(
        CheckpointError, match=r"weights has 5 bytes instead of 10, or manifest.json beside it was changed"
    ):
        sealed.verify(folder)


def test_a_changed_byte_is_named(folder: Path):
    (folder / "inner" / "more").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"more was changed"):
        sealed.verify(folder)


def test_a_missing_file_is_named(folder: Path):
    (folder / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"weights is missing"):
        sealed.verify(folder)


@pytest.mark.parametrize(
    "torn", ["", '{"files": {"wei', "[]", '{"files": null', '{"files": {}}', '{"files": {}, "seal": ""}']
)
def test_a_torn_manifest_is_named(folder: Path, torn: str):
    (folder / sealed.MANIFEST).write_text(torn)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        sealed.verify(folder)


def test_without_a_manifest_it_is_no_checkpoint(folder: Path):
    (folder / sealed.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="the files beside it cannot be verified"):
        sealed.verify(folder)


def test_a_link_moves_in_one_step(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sealed.point(tmp_path / "latest", tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name


def test_a_list_that_lost_a_file_and_a_file_that_no_list_names_are_refused(folder: Path):
    manifest = folder / sealed.MANIFEST
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**said, "files": {"weights": said["files"]["weights"]}}))
    with pytest.raises(CheckpointError, match="does not match the hash"):
        sealed.verify(folder)
    manifest.write_text(json.dumps(said))
    (folder / "inner" / "added").touch()
    with pytest.raises(CheckpointError, match=r"added is not in manifest\.json"):
        sealed.verify(folder)


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_the_manifest_goes_unseen_where_it_says_something(folder: Path, bit: int):
    """White space aside, which says nothing."""
    manifest = folder / sealed.MANIFEST
    whole = manifest.read_bytes()
    meant = json.loads(whole)
    for place in range(len(whole)):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            sealed.verify(folder)
        except CheckpointError:
            continue
        assert json.loads(manifest.read_bytes()) == meant, f"byte {place}"


def test_a_death_amid_a_replacement_leaves_the_old_one_whole_or_none_and_an_error_its_space(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(OSError, match="full"), sealed.replacing(folder) as aside:
        (aside / "weights").write_bytes(b"half")
        raise OSError("full")
    sealed.verify(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def dies(path: Path, **_) -> None:
        for file in path.rglob("weights"):
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), sealed.replacing(folder) as aside:
        patched.setattr("shutil.rmtree", dies)
        (aside / "new").write_bytes(b"new")
    sealed.verify(folder)
    with sealed.replacing(folder) as aside:
        (aside / "newer").write_bytes(b"newer")
    sealed.verify(folder)
    assert (folder / "newer").is_file() and [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_was_put_beside_sealed_files_is_told_apart(folder: Path):
    assert sealed.strangers(folder) == []
    (folder / "inner" / "mine").write_text("x")
    assert sealed.strangers(folder) == ["inner/mine"]
    (folder / sealed.MANIFEST).unlink()
    assert sorted(sealed.strangers(folder)) == ["inner/mine", "inner/more", "weights"]


@pytest.mark.parametrize("settled", [True, False])
def test_what_was_found_whole_is_read_again_only_if_it_was_touched_since_or_may_have_been(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
):
    """A file that is as young as its clock is coarse may change again and have the same time."""
    read, digest = [], sealed._digest
    monkeypatch.setattr(sealed, "SETTLED_NS", 0 if settled else 1 << 62)
    monkeypatch.setattr(sealed, "_digest", lambda path: read.append(path.name) or digest(path))
    for _ in range(2):
        sealed.verify(folder)
    assert read == ["more", "weights"] * (1 if settled else 2)
    (folder / "weights").write_bytes(b"0123456780")
    with pytest.raises(CheckpointError, match=r"weights was changed"):
        sealed.verify(folder)
