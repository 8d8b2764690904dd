"""`learner.early_groups` on two ranks: rank 0 decides what is begun, and both do the same of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.learner.early_replay import EarlyReplay
from tests.learner.fed_replay import largest_difference
from tests.learner.rank_process import train_on_ranks
from tests.learner.test_early import make_config

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def test_two_ranks_begin_the_same_and_give_up_the_same(tmp_path: Path):
    """Of step 1 the first groups are sealed in another order than they were begun in: both ranks compute it anew."""
    ends = []
    for parts in (0, 3):
        config = make_config(tmp_path, f"parts{parts}", updates_per_batch=2, early_groups=1, steps=3)
        replay = partial(EarlyReplay, parts, together=1, updates=2, swapped=(1,))
        ends.append(train_on_ranks(config, 2, replay=replay))
        row = load_file(Path(config.run.dir) / "row.safetensors")
        assert row["step/early_groups"].item() == parts
    assert largest_difference(*ends) == 0.0
