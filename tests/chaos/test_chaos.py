"""The real server and clients under kills, pauses and power losses; and mistakes that must be caught."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from .check import Verdict
from .harness import DRAIN_S, free_address, running
from .learner import train
from .run import chaos, failpoints
from .settings import SILENCE_S, ChaosSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def settings_in(folder: Path, **changes) -> ChaosSettings:
    values = {"folder": str(folder / "run"), "address": free_address(), "sync_delay_s": 0.01}
    return ChaosSettings(**(values | changes))


def chaotic(folder: Path, seed: int, counts: dict[str, int], drain_s: float = DRAIN_S, **changes) -> Verdict:
    with running(settings_in(folder, **changes), seed, drain_s) as harness:
        chaos(harness, Random(seed), counts=counts)
        return harness.finish()


def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whatever_dies(tmp_path: Path) -> None:
    counts = {"worker": 3, "server": 1, "learner": 2, "everything": 1, "power": 3, "pause": 1}
    verdict = chaotic(tmp_path, 1, counts)
    assert verdict.passed, verdict
    assert verdict.acked > 40 and verdict.rollbacks >= 3


def test_with_a_fixed_order_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """Depth 0 admits exactly the groups of the next step, so what each step is fed is known before the run; the wide
    bound keeps groups that a rollback has put on another line of descent."""
    steps = 8
    fixed = settings_in(tmp_path, max_staleness=50, pipeline_depth=0, steps=steps)
    with running(fixed, 2) as harness:
        for fault in ("learner", "power", "worker", "everything"):
            harness.wait_for_steps(1)
            harness.fault(fault)
        verdict = harness.finish()
    assert verdict.passed, verdict
    undisturbed = ""
    for step in range(steps):
        size = fixed.groups_per_step
        undisturbed = train(undisturbed, list(range(step * size, (step + 1) * size)))
    finished = (fixed.root / "history" / "learner.jsonl").read_text().splitlines()[-1]
    assert undisturbed in finished


def test_a_crash_at_every_kind_of_failpoint_loses_nothing(tmp_path: Path) -> None:
    for name, verdict in failpoints(settings_in(tmp_path), seed=3, passes=1):
        assert verdict.passed, (name, verdict)


@pytest.mark.parametrize(
    ("mutant", "counts"),
    [
        ("ack_before_fsync", {"power": 6}),
        ("no_dedup", {"worker": 2}),
        ("group_split", {"worker": 2}),
    ],
)
def test_a_planted_mistake_is_caught(tmp_path: Path, mutant: str, counts: dict[str, int]) -> None:
    try:
        verdict = chaotic(tmp_path, 5, counts, drain_s=25.0, mutant=mutant, sync_delay_s=0.1, repeats=0.5)
    except TimeoutError:
        return  # wedged: also caught
    assert not verdict.passed, verdict


def test_a_batch_handed_out_before_its_plan_is_durable_is_caught(tmp_path: Path) -> None:
    """Kills at random moments do not find this one: the power is cut while the plan is being synced."""
    with running(settings_in(tmp_path, mutant="early_manifest", sync_delay_s=0.4), 6) as harness:
        harness.wait_for_steps(1)
        for _ in range(4):
            harness.wait_for("leased", 1)
            harness.power_loss()
        verdict = harness.finish()
    assert verdict.wrong, verdict


def test_a_stopped_worker_is_named_and_what_it_says_afterwards_counts_for_nothing(tmp_path: Path) -> None:
    with running(settings_in(tmp_path), 7) as harness:
        harness.wait_for_worker("w0")
        harness.pause("w0", DRAIN_S)
        harness.wait_until(lambda: "worker w0 was silent" in harness.said("server"), "the server does not name w0")
        harness.wait_for_steps(4)
        harness.pause("w0", 0)
        harness.wait_for_steps(4)
        verdict = harness.finish()
    assert verdict.passed, verdict


def test_a_group_taken_from_an_attempt_that_was_given_up_is_caught(tmp_path: Path) -> None:
    verdicts = []
    for seed in (8, 9, 10):  # Whether the stopped worker had a group in hand is chance.
        with running(settings_in(tmp_path / str(seed), mutant="no_fencing", slowest_s=4 * SILENCE_S), seed) as harness:
            harness.wait_for_steps(1)
            for _ in range(4):
                harness.pause("w0", 2 * SILENCE_S)
                harness.wait(3 * SILENCE_S)
            verdicts.append(harness.finish())
        if verdicts[-1].fenced or verdicts[-1].audit:
            return
    raise AssertionError(verdicts)
