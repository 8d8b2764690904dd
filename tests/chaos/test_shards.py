"""Payloads in shards under the same faults, judged by the same verdict as without shards."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.addresses import free_address

from .harness import running
from .power import unsynced
from .run import chaos
from .settings import ChaosSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings_in(folder: Path, **changes) -> ChaosSettings:
    values = {
        "folder": str(folder / "run"),
        "address": free_address(),
        "shards": [free_address() for _ in range(2)],
        "sync_delay_s": 0.01,
    }
    return ChaosSettings(**(values | changes))


def test_shards_that_die_or_lose_power_cost_no_acknowledged_group(tmp_path: Path) -> None:
    counts = {"shard": 2, "shard_power": 3, "power": 1, "learner": 1, "everything": 1}
    with running(settings_in(tmp_path), 21, drain_s=120.0) as harness:
        chaos(harness, Random(21), counts=counts)
        verdict = harness.finish()
    assert verdict.passed, verdict
    assert harness.faults == counts and verdict.rollbacks >= 1


def holds_more_than_a_mark(notes: list[list[Any]]) -> bool:
    return sum(len(note[3]) // 2 for note in notes if note[0] == "write") > 400


def test_a_shard_that_acknowledges_what_is_not_durable_is_caught(tmp_path: Path) -> None:
    """Its power is cut while something it has acknowledged waits for the sync: sooner or later that is a payload."""
    slow = settings_in(tmp_path, mutant="shard_ack_before_fsync", sync_delay_s=0.3)
    with running(slow, 22, drain_s=120.0) as harness:
        harness.wait_for_steps(1)
        journal = slow.shard_journal(0)
        for _ in range(30):
            # A payload that is lost ends the learner, at once or some steps later; after that nothing is written.
            harness.wait_until(
                lambda: harness.seen("error") > 0 or holds_more_than_a_mark(unsynced(journal)), "shard 0 wrote nothing"
            )
            if harness.seen("error"):
                break
            harness.kill_shard(0, power=True)
            before = harness.seen("trained")
            harness.wait_until(
                lambda known=before: harness.seen("error") > 0 or harness.seen("trained") > known, "wedged"
            )
        said = (slow.root / "history" / "learner.jsonl").read_text()
    assert "shard 0 does not have the payload" in said
