"""`learner.early_groups` on two ranks: rank 0 decides what is begun, and both do the same of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.learner.fed_replay import largest_difference
from tests.learner.rank_process import train_on_ranks
from tests.learner.step.early_replay import EarlyReplay
from tests.learner.step.test_early import make_config

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("ranks", "replicas", "lora_rank"),
    [
        (2, 1, 0),
        pytest.param(2, 1, 4, marks=pytest.mark.long),
        pytest.param(2, 2, 0, marks=pytest.mark.long),
        pytest.param(4, 2, 0, marks=pytest.mark.long),
        pytest.param(4, 2, 4, marks=pytest.mark.long),
    ],
)
def test_the_ranks_begin_the_same_and_give_up_the_same(tmp_path: Path, ranks: int, replicas: int, lora_rank: int):
    """Of step 1 the first groups are sealed in another order than they were begun in: all ranks compute it anew."""
    ends = []
    for parts in (0, 3):
        settings = {"updates_per_batch": 2, "early_groups": 1, "steps": 3, "ranks": ranks, "replicas": replicas}
        config = make_config(tmp_path, f"parts{parts}", **settings)
        config.model = replace(config.model, lora_rank=lora_rank)
        replay = partial(EarlyReplay, parts, together=1, updates=2, swapped=(1,))
        ends.append(train_on_ranks(config, ranks, replay=replay))
        row = load_file(Path(config.run.dir) / "row.safetensors")
        assert row["step/early_groups"].item() == parts
    assert largest_difference(*ends) == 0.0
