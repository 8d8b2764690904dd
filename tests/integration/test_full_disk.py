"""All processes of a run on one small disk that becomes full during the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import JOURNAL_DIR
from asyncrl.replay.audit.report import audit
from asyncrl.replay.journal.recovery import read_journal
from tests.integration.conftest import StartLocal
from tests.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(1200)]

STEPS = 40
"""More than are trained before the disk is seen to be filled."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """The run folder itself."""
    with small_disk(tmp_path / "run", 24) as disk:
        yield disk


def test_a_run_whose_disk_is_full_ends_in_one_sentence_and_goes_on_when_there_is_space(
    disk: SmallDisk, start_local: StartLocal
) -> None:
    settings = {
        "engine": "fake",
        "rollout.host": "process",
        "learner.steps": STEPS,
        "learner.save_every": 4,
        "learner.keep_checkpoints": 1,
        "replay.journal.segment_mb": 1,
    }
    run = start_local(settings)
    run.wait_for_step(5, 600)
    disk.fill()
    assert run.finish(400) != 0, run.tail()
    said = run.output.read_text()
    assert "the disk is full: " in said and " needs " in said and "resume=auto" in said, run.tail()
    disk.free()
    again = start_local(settings | {"resume": "auto"})
    assert again.finish(600) == 0, again.tail()
    assert [row["step"] for row in again.rows()] == list(range(1, STEPS + 1))
    books = audit(read_journal(run.directory / JOURNAL_DIR))
    assert books.balances and books.trained == STEPS * 8 and books.finished, books
