"""How many groups a worker runs at once, and how many sequences its engine then has."""

from __future__ import annotations

import itertools

import pytest

from asyncrl.config import load_config
from asyncrl.rollout.worker.concurrency import sequences_per_engine, slots_per_worker
from asyncrl.schema import Config

BASE = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f"])


def config(in_flight: int, workers: int, together: int, size: int) -> Config:
    BASE.rollout.max_in_flight, BASE.rollout.workers, BASE.rollout.group_size = in_flight, workers, size
    BASE.engine.max_sequences = together
    return BASE


@pytest.mark.parametrize(
    ("in_flight", "workers", "together", "size", "slots", "sequences"),
    [
        (64, 2, 256, 8, 32, 256),  # its share fills the engine exactly
        (64, 8, 256, 8, 8, 64),  # its share leaves the engine room
        (1000, 2, 256, 8, 40, 256),  # more than fill it, and a quarter to take the places that become free
        (4, 8, 256, 8, 1, 8),  # fewer groups than workers
        (64, 1, 4, 8, 2, 4),  # a group larger than the engine
    ],
)
def test_a_worker_holds_its_share_and_no_more_than_keep_its_engine_full(
    in_flight: int, workers: int, together: int, size: int, slots: int, sequences: int
) -> None:
    made = config(in_flight, workers, together, size)
    assert (slots_per_worker(made), sequences_per_engine(made)) == (slots, sequences)


def test_by_sample_a_worker_holds_members() -> None:
    made = config(64, 2, 256, 8)
    made.replay.admission = "sample"
    assert (slots_per_worker(made), sequences_per_engine(made)) == (256, 256)
    made = config(1000, 2, 256, 8)
    assert (slots_per_worker(made), sequences_per_engine(made)) == (320, 256)
    made.replay.admission = "group"


def test_all_that_is_admitted_has_a_slot_unless_the_engines_are_full() -> None:
    for numbers in itertools.product((1, 7, 64, 500), (1, 3, 8), (1, 16, 256), (1, 4, 8)):
        made = config(*numbers)
        held = slots_per_worker(made) * made.rollout.workers
        assert held >= made.rollout.max_in_flight or sequences_per_engine(made) == made.engine.max_sequences, numbers
