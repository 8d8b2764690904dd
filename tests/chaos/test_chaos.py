"""The real server and clients under kills, pauses and power losses, and planted mistakes that must be caught."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.addresses import free_address

from .check import Verdict, check
from .harness import DRAIN_S, Harness, LearnerRefused, running
from .learner import train
from .run import chaos, failpoints
from .settings import SILENCE_S, ChaosSettings
from .stops import stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FULL = "the disk is full"
SILENT = "worker w0 was silent"
ATTEMPTS = 6
"""Seeds within which a planted mistake must show."""


def settings_in(folder: Path, **changes) -> ChaosSettings:
    values = {"folder": str(folder / "run"), "address": free_address(), "sync_delay_s": 0.01}
    return ChaosSettings(**(values | changes))


def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whatever_dies(tmp_path: Path) -> None:
    counts = {"worker": 3, "server": 1, "learner": 2, "everything": 1, "power": 3, "pause": 1}
    with running(settings_in(tmp_path), 1) as harness:
        chaos(harness, Random(1), counts=counts)
        harness.wait_for_steps(2)  # None of which is undone: else the last death could have taken all there was.
        verdict = harness.finish()
    assert verdict.passed, verdict
    assert verdict.trained >= 8 and verdict.rollbacks >= 1


@pytest.mark.long
def test_a_group_is_trained_in_exactly_three_steps_whatever_dies(tmp_path: Path) -> None:
    """At a bound that nothing reaches: only what the end of the run cuts off is trained in fewer."""
    counts = {"worker": 3, "server": 3, "learner": 3, "everything": 1, "power": 2}
    with running(settings_in(tmp_path, uses=3, max_staleness=12), 21) as harness:
        chaos(harness, Random(21), counts=counts)
        harness.wait_for_steps(6)
        verdict = harness.finish()
    assert verdict.passed, verdict
    whole = verdict.trained_in.pop(3)
    assert whole >= 8 and sum(verdict.trained_in.values()) == verdict.retired, verdict


def test_cut_slow_and_silent_connections_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    counts = {"cut": 4, "delay": 1, "blackhole": 3, "worker": 1, "server": 1}
    with running(settings_in(tmp_path, listen=free_address()), 4) as harness:
        chaos(harness, Random(4), counts=counts)
        verdict = harness.finish()
    assert verdict.passed, verdict


def test_a_full_disk_is_named_survives_the_death_of_its_server_and_costs_nothing(tmp_path: Path) -> None:
    with running(settings_in(tmp_path), 11) as harness:
        harness.wait_for_steps(2)
        harness.settings.full.touch()
        harness.wait_until(lambda: FULL in harness.said("server"), "the server does not say why it stands")
        harness.kill("server")
        said = harness.said("server").count(FULL)
        harness.wait_until(lambda: harness.said("server").count(FULL) > said, "started again, it does not say so")
        harness.settings.full.unlink()
        harness.wait_for_steps(2)
        verdict = harness.finish()
    assert verdict.passed, verdict


def test_a_disk_without_space_stops_the_run_until_there_is_space(tmp_path: Path) -> None:
    """A real one, of 4 MB, all but filled by another's file; the next segment does not fit."""
    settings = settings_in(tmp_path)
    harness = Harness(settings, 12)
    try:
        with small_disk(settings.journal, megabytes=4):
            harness.restart_the_dead()
            harness.wait_for_steps(2)
            ballast = settings.journal / "ballast"
            harness.kill("server")
            # What the killed server left unused of its segment comes free, which is not enough for the next.
            ballast.write_bytes(bytes(shutil.disk_usage(settings.journal).free - 4096))
            harness.wait_until(lambda: FULL in harness.said("server"), "the server does not say why it stands")
            ballast.unlink()
            harness.wait_for_steps(2)
            verdict = harness.finish()
    finally:
        harness.close()
    assert verdict.passed, verdict


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_journal_damaged_while_its_server_was_down_is_refused_by_name_and_mended_goes_on(tmp_path: Path) -> None:
    with running(settings_in(tmp_path), 13) as harness:
        harness.wait_for_steps(2)
        harness.corrupt()
        harness.wait_for_steps(2)
        verdict = harness.finish()
    assert verdict.passed, verdict


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
    with running(settings_in(tmp_path), 3) as harness:
        failpoints(harness, passes=1)
        verdict = harness.finish()
    assert verdict.passed, verdict


def caught(folder: Path, play: Callable[[Harness, Random], object], **changes) -> bool:
    """Whether the oracle finds the mistake with one of several seeds: which moment a fault hits is chance."""
    for seed in range(ATTEMPTS):
        if not verdict_on(settings_in(folder / str(seed), **changes), seed, play).passed:
            return True
    return False


def verdict_on(settings: ChaosSettings, seed: int, play: Callable[[Harness, Random], object]) -> Verdict:
    """A run that only stands still proves nothing; but some mistakes leave it so. What standing still is, the machine
    says: whoever died is started again in less time than all were."""
    with running(settings, seed) as harness:
        started = time.monotonic()
        try:
            harness.wait_for_steps(1)
            harness.drain_s = min(DRAIN_S, 20.0 + 3 * (time.monotonic() - started))
            play(harness, Random(seed))
            return harness.finish()
        except (TimeoutError, LearnerRefused):
            harness.close()
            return check(settings, ended=False)


@pytest.mark.parametrize(
    ("mutant", "counts"),
    [
        ("ack_before_fsync", {"power": 6}),
        ("no_dedup", {"worker": 2}),
        ("group_split", {"worker": 2, "cut": 2}),
    ],
)
def test_a_planted_mistake_is_caught(tmp_path: Path, mutant: str, counts: dict[str, int]) -> None:
    def play(harness: Harness, random: Random) -> None:
        chaos(harness, random, counts=counts)

    changes = {"mutant": mutant, "sync_delay_s": 0.1, "repeats": 0.5, "listen": free_address()}
    assert caught(tmp_path, play, **changes)


def test_a_batch_handed_out_before_its_plan_is_durable_is_caught(tmp_path: Path) -> None:
    """Kills at random moments do not find this one: the power is cut while the plan is being synced."""

    def play(harness: Harness, random: Random) -> None:
        harness.wait_for_steps(1)
        for _ in range(4):
            harness.wait_for("leased", 1)
            harness.power_loss()

    assert caught(tmp_path, play, mutant="early_manifest", sync_delay_s=0.4)


def test_a_stopped_worker_is_named_and_what_it_says_afterwards_counts_for_nothing(tmp_path: Path) -> None:
    with running(settings_in(tmp_path), 7) as harness:
        harness.wait_for_worker("w0")
        named = harness.said("server").count(SILENT)
        harness.pause("w0", 2 * DRAIN_S)
        harness.wait_until(lambda: harness.said("server").count(SILENT) > named, "the server does not name w0")
        harness.wait_for_steps(4)
        harness.pause("w0", 0)
        harness.wait_for_steps(4)
        verdict = harness.finish()
    assert verdict.passed, verdict


@pytest.mark.parametrize("role", ["server", "learner"])
def test_a_stopped_role_is_named_by_all_others_and_the_run_goes_on(tmp_path: Path, role: str) -> None:
    settings = settings_in(tmp_path, slowest_s=0.5)
    stopped = stop(settings, role, 3 * SILENCE_S, patience_s=DRAIN_S)
    assert stopped.verdict.passed, stopped
    assert set(stopped.named) == {"server": {"w0", "w1", "learner"}, "learner": {"server", "w0", "w1"}}[role]


def test_a_group_taken_from_an_attempt_that_was_given_up_is_caught(tmp_path: Path) -> None:
    def play(harness: Harness, random: Random) -> None:
        harness.wait_for_worker("w0")
        for _ in range(4):
            harness.wait_for_order("w0")
            named = harness.said("server").count(SILENT)
            harness.pause("w0", DRAIN_S)
            harness.wait_until(lambda n=named: harness.said("server").count(SILENT) > n, "w0 is not named")
            harness.pause("w0", 0)
            harness.wait_for_steps(1)

    assert caught(tmp_path, play, mutant="no_fencing", slowest_s=4 * SILENCE_S)
