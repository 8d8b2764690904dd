from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.learner import durable


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "step_1"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "inner" / "more").write_bytes(b"abc")
    durable.seal(folder)
    return folder


def test_what_was_sealed_verifies(sealed: Path):
    durable.verify(sealed)


def test_a_file_cut_short_is_named(sealed: Path):
    (sealed / "weights").write_bytes(b"01234")
    with pytest.raises(CheckpointError, match=r"weights has 5 bytes instead of 10"):
        durable.verify(sealed)


def test_a_changed_byte_is_named(sealed: Path):
    (sealed / "inner" / "more").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"more was changed"):
        durable.verify(sealed)


def test_a_missing_file_is_named(sealed: Path):
    (sealed / "weights").unlink()
    with pytest.raises(CheckpointError, match=r"weights is missing"):
        durable.verify(sealed)


@pytest.mark.parametrize("torn", ["", '{"files": {"wei', "[]", '{"files": null'])
def test_a_torn_manifest_is_named(sealed: Path, torn: str):
    (sealed / durable.MANIFEST).write_text(torn)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        durable.verify(sealed)


def test_without_a_manifest_it_is_no_checkpoint(sealed: Path):
    (sealed / durable.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        durable.verify(sealed)


def test_a_link_moves_in_one_step(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        durable.point(tmp_path / "latest", tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
