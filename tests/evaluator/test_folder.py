from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import RunFolderError
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluator.folder import EVAL_FILE, SAMPLES_FILE, opened

MADE_OF = {"eval.rows": 3, "seed": 0, "model.path": "m"}


def folder(path: Path, made_of=None, *, overwrite: bool = False):
    return opened(path, made_of or MADE_OF, samples=2, overwrite=overwrite)


def samples(row: int, *, failed: int = 0, reward: float = 1.0) -> list[Sample]:
    good = [Sample(row=row, sample=n, completion="é", reward=reward, finish_reason="stop") for n in range(2 - failed)]
    return good + [Sample(row=row, sample=2 - failed + n, failed="RewardError: no") for n in range(failed)]


def test_a_start_after_another_goes_on_with_the_rows_that_are_missing(tmp_path: Path) -> None:
    with folder(tmp_path / "e") as first:
        assert first.missing() == [0, 1, 2]
        first.add(2, samples(2))
    with folder(tmp_path / "e") as second:
        assert second.missing() == [0, 1]
        assert second.done == {2: samples(2)}


@pytest.mark.parametrize("cut", range(1, 160, 13))
def test_a_row_that_was_cut_in_the_middle_of_its_write_is_missing(tmp_path: Path, cut: int) -> None:
    with folder(tmp_path) as first:
        first.add(0, samples(0))
        first.add(1, samples(1))
    path = tmp_path / SAMPLES_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with folder(tmp_path) as second:
        assert second.missing() == [1, 2]
        second.add(1, samples(1))
        assert second.missing() == [2]
    with folder(tmp_path) as third:  # what was cut and its second writing are no four samples
        assert third.missing() == [2] and len(third.done[1]) == 2


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ('"reward"', '"rewxrd"'),
        ('"row": 1', '"row": "1"'),
        ("1.0", '"1.0"'),
        ('"\u00e9"', "7"),
        ('"sample": 0', '"sample": null'),
    ],
)
def test_a_row_of_which_a_line_was_damaged_is_made_again(tmp_path: Path, was: str, is_now: str) -> None:
    with folder(tmp_path) as first:
        for row in (0, 1, 2):
            first.add(row, samples(row))
    path = tmp_path / SAMPLES_FILE
    lines = path.read_text().splitlines(keepends=True)
    assert was in lines[2]
    path.write_text("".join([*lines[:2], lines[2].replace(was, is_now), *lines[3:]]))
    with folder(tmp_path) as second:
        assert second.missing() == [1]
        second.add(1, samples(1))
        assert second.missing() == []


def test_a_row_with_a_failure_is_tried_again_and_its_newest_samples_count(tmp_path: Path) -> None:
    with folder(tmp_path) as first:
        first.add(0, samples(0, failed=2))
        first.add(1, samples(1, failed=1, reward=0.5))
        assert first.missing() == [0, 1, 2]
    with folder(tmp_path) as second:
        second.add(1, samples(1))
    with folder(tmp_path) as third:
        assert third.missing() == [0, 2]
        assert third.done[1] == samples(1) and third.done[0] == samples(0, failed=2)


def test_an_evaluation_with_other_settings_is_refused_by_their_names(tmp_path: Path) -> None:
    with folder(tmp_path) as first:
        first.add(0, samples(0))
    before = (tmp_path / SAMPLES_FILE).read_bytes()
    with (
        pytest.raises(
            RunFolderError, match=r"other settings: eval.rows: 3 -> 5; seed: 0 -> 1\. Give the same settings"
        ),
        folder(tmp_path, {**MADE_OF, "seed": 1, "eval.rows": 5}),
    ):
        pass
    assert (tmp_path / SAMPLES_FILE).read_bytes() == before
    with folder(tmp_path, {**MADE_OF, "seed": 1}, overwrite=True) as anew:
        assert anew.missing() == [0, 1, 2]


def test_a_folder_of_somebody_else_is_left_alone_even_where_it_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match="is not touched"), folder(tmp_path, overwrite=overwrite):
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_whose_settings_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with folder(tmp_path):
        pass
    for text in ("{", "[]", '{"made_of": 3}'):
        (tmp_path / EVAL_FILE).write_text(text)
        with pytest.raises(RunFolderError, match="it is not known which settings made the samples"), folder(tmp_path):
            pass


def test_two_evaluations_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        folder(tmp_path),
        pytest.raises(RunFolderError, match="in progress"),
        folder(tmp_path),
    ):
        pass


def test_lines_are_json_that_a_reader_of_texts_can_read(tmp_path: Path) -> None:
    with folder(tmp_path) as kept:
        kept.add(0, samples(0, failed=1))
    good, failed = ((json.loads(line)) for line in (tmp_path / SAMPLES_FILE).read_text().splitlines())
    assert {name: good[name] for name in ("row", "sample", "completion", "reward")} == {
        "row": 0, "sample": 0, "completion": "é", "reward": 1.0
    }  # fmt: skip
    assert failed["failed"] == "RewardError: no" and "reward" not in failed
