"""Small JSON files of a run folder replaced by others: readers report it, or take the file as missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import CheckpointDamagedError, CheckpointError
from asyncrl.learner.checkpoints.state import read_state
from asyncrl.storage import sealed
from asyncrl.storage.best import read_best
from asyncrl.storage.checkpoints import branch_begun, position_of, trained_in
from asyncrl.storage.lines import row_of
from asyncrl.storage.objects import read_object
from asyncrl.telemetry.folder.resumed import is_supervised
from asyncrl.telemetry.folder.run_folder import origin_of

NONE = ["", "null", "[]", "3", '"x"', "[" * 100_000, '{"a":' * 100_000, "\0" * 64]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_object_is_none_to_every_reader(tmp_path: Path, text: str) -> None:
    for name in ("best.json", "branch.json", "exported.json", "manifest.json", "run.json", "state.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError):
        read_object(tmp_path / "run.json")
    assert read_best(tmp_path) is None and trained_in(tmp_path) is None and not branch_begun(tmp_path, "x", "y")
    assert origin_of(tmp_path) == "" and not is_supervised(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        position_of(tmp_path)
    with pytest.raises(CheckpointDamagedError, match=r"state\.json cannot be read"):
        read_state(tmp_path / "state.json")
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json is damaged"):
        sealed.verify(tmp_path)
    assert row_of(text.encode()) is None


def test_values_of_other_kinds_are_none_either(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a", "made_of": 5, "code": 7}')
    assert not is_supervised(tmp_path)
    for name in ("state.json", "exported.json"):
        (tmp_path / name).write_text('{"step": 1e999, "policy_version": 1, "trained_steps": 1e999}')
    assert trained_in(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        position_of(tmp_path)


def test_a_folder_in_the_place_of_a_manifest_or_a_file_in_that_of_a_checkpoint_is_damage(tmp_path: Path) -> None:
    (tmp_path / "step_4" / "manifest.json").mkdir(parents=True)
    (tmp_path / "step_8").write_text("no checkpoint")
    for name in ("step_4", "step_8"):
        with pytest.raises(CheckpointDamagedError, match=rf"{name}/manifest\.json"):
            sealed.verify(tmp_path / name)
