"""Rows of each step: every row once per epoch, and the same rows after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data.dataset import Dataset
from asyncrl.errors import DataError
from asyncrl.sft import step
from asyncrl.sft.batches import Course, RowBatches
from asyncrl.sft.examples import Examples, open_encoder
from asyncrl.sft.settings import SftConfig
from asyncrl.sft.step import agree_on_rows
from tests.sft.given import CPU, rows_of, settings


def batches(given: SftConfig, course: Course) -> RowBatches:
    rows = [rows_of(given)]
    return RowBatches(
        Examples(rows, open_encoder(given)), Dataset(rows).order(seed=given.seed, shuffle=given.data.shuffle), course
    )


def course(given: SftConfig, **changes: int) -> Course:
    by = given.learner
    return Course.of(20, by.rows_per_step, by.epochs, by.steps, **changes)


def texts_of(found: RowBatches, step: int, world: int = 1) -> list[bytes]:
    """Of all ranks together."""
    leases = [found.lease(step=step, rank=rank, world=world, wait_s=0.0) for rank in range(world)]
    return sorted(bytes(t.token_ids[:-1].astype("u1")) for lease in leases for t in lease.trajectories.values())


def test_epochs_and_steps_are_counted_in_rows(tmp_path: Path) -> None:
    one = course(settings(tmp_path))
    assert (one.steps, one.window(3)) == (4, range(18, 20)), "the last step takes what is left"
    assert course(settings(tmp_path, "learner.epochs=2.5")).steps == 9
    assert course(settings(tmp_path, "learner.epochs=0.01")).steps == 1
    assert course(settings(tmp_path, "learner.steps=7")).window(6) == range(36, 42)


def test_a_resume_goes_on_with_the_next_row_also_where_a_step_has_other_rows(tmp_path: Path) -> None:
    resumed = course(settings(tmp_path, "learner.epochs=2"), step=2, draw=12)
    assert [resumed.window(step) for step in (2, 6)] == [range(12, 18), range(36, 40)] and resumed.steps == 7
    smaller = course(settings(tmp_path, "learner.epochs=2", "learner.rows_per_step=4"), step=2, draw=12)
    assert smaller.window(2) == range(12, 16) and smaller.steps == 9
    by_steps = course(settings(tmp_path, "learner.steps=5"), step=2, draw=12)
    assert by_steps.steps == 5 and by_steps.window(4) == range(24, 30)
    assert course(settings(tmp_path), step=9, draw=54).steps == 9, "nothing is left"


@pytest.mark.parametrize("world", [1, 3])
def test_every_row_comes_once_in_an_epoch_on_any_number_of_ranks_and_the_order_is_of_the_seed(
    tmp_path: Path, world: int
) -> None:
    given = settings(tmp_path, "learner.epochs=2")
    found = batches(given, course(given))
    steps = [texts_of(found, step, world) for step in range(7)]
    drawn = [text for step in steps for text in step]
    assert len(drawn) == 40 and all(drawn.count(text) % 2 == 0 for text in drawn)
    again = batches(given, course(given))
    assert texts_of(again, 5) == steps[5], "whoever asks, and whatever was asked before"
    other = settings(tmp_path, "learner.epochs=2", "seed=1")
    assert texts_of(batches(other, course(other)), 0) != steps[0]


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    given = settings(tmp_path, "data.max_tokens=9", "data.shuffle=false", "learner.rows_per_step=20")
    found = batches(given, course(given))
    lease = found.lease(step=0, rank=0, world=1, wait_s=0.0)
    told = found.told(0)
    assert told.dropped > 0 and told.rows + told.dropped == 20 and len(lease.plan.groups) == told.rows
    assert told.tokens == sum(group.trajectories[0].length for group in lease.plan.groups)
    assert (told.cut, told.epoch) == (0, 1.0)


def test_ranks_that_drew_other_rows_of_the_same_lengths_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for answer in ("ab", "ba", "ab"):
        given = settings(tmp_path, rows=[{"prompt": "q", "completion": answer}] * 20)
        found = batches(given, course(given))
        found.lease(step=0, rank=0, world=1, wait_s=0.0)
        digests.append(found.told(0).digest)
    assert digests[0] == digests[2]
    agree_on_rows(0, digests[0], CPU)
    monkeypatch.setattr(step, "text_of_rank_zero", lambda *_: digests[1])
    with pytest.raises(DataError, match="step 3: this rank drew other rows than rank 0"):
        agree_on_rows(3, digests[0], CPU)
