"""A death during a save leaves the checkpoint before it intact, and every flipped byte is detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import saves


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_kills_during_saves_leave_a_whole_checkpoint_each_time_and_a_hundred_flips_are_found(tmp_path: Path):
    found = saves.run(20, 100, 0, tmp_path)
    assert found["wrong"] == [] and found["unseen"] == []
    assert found["trained_steps"] > 10, "some lives went on from the one before"
