"""All processes of a run on one small disk that becomes full during the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import JOURNAL_DIR
from asyncrl.replay.audit.report import audit
from asyncrl.replay.journal.recovery import read_journal
from asyncrl.storage.lines import read_lines
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


def test_a_run_whose_disk_is_full_says_so_stands_still_and_goes_on_when_there_is_space(
    disk: SmallDisk, start_local: StartLocal
) -> None:
    run = start_local(
        {
            "engine": "fake",
            "rollout.host": "process",
            "learner.steps": STEPS,
            "learner.save_every": 4,
            "learner.keep_checkpoints": 1,
            "replay.journal.segment_mb": 1,
        }
    )
    run.wait_for_step(2, 600)
    disk.fill()
    run.until(lambda: "the disk is full: " in run.output.read_text(), "it was not said", 400)
    disk.fill()  # again: a checkpoint that was half written is removed, and lines had space in its place
    assert "Nothing is lost" in run.output.read_text()
    before = len(run.rows())
    time.sleep(2)  # a few turns of everybody who waits
    assert run.process.poll() is None and len(run.rows()) <= before + 1 < STEPS, run.tail()
    disk.free()
    run.until(lambda: "there is space again" in run.output.read_text(), "it was not said", 400)
    assert run.finish(400) == 0, run.tail()
    assert "restarted" not in run.output.read_text(), "the wait is no death"
    for name in ("metrics", "ledger", "samples"):
        assert not read_lines(run.directory / f"{name}.jsonl").damaged
    assert [row["step"] for row in run.rows()] == list(range(1, STEPS + 1))
    books = audit(read_journal(run.directory / JOURNAL_DIR))
    assert books.balances and books.trained == STEPS * 8 and books.finished, books
