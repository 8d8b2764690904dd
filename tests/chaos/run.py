"""Run chaos for N seconds, then print the verdict in figures: `python -m tests.chaos.run --seconds N --seed S`.

`--counts worker=100,server=20,...` instead of `--seconds` runs until that many faults of each kind have happened.
`--failpoints N` crashes the server at each of the first N passes of every failpoint instead.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.addresses import free_address

from .check import Verdict
from .harness import DRAIN_S, Harness, running
from .power import POINTS, lose_power
from .settings import ChaosSettings

WEIGHTS = {
    "worker": 5,
    "server": 2,
    "learner": 2,
    "everything": 1,
    "power": 5,
    "pause": 1,
    "cut": 3,
    "delay": 1,
    "blackhole": 2,
    "full": 1,
    "corrupt": 1,
}


def chaos(harness: Harness, random: Random, *, seconds: float = 0.0, counts: dict[str, int] | None = None) -> None:
    """Inject faults at random moments until the time is up or every count is reached."""
    until = time.monotonic() + seconds
    harness.wait_for_steps(2)
    left = dict(counts or {})
    while left if counts else time.monotonic() < until:
        kinds = [kind for kind in WEIGHTS if not counts or kind in left]
        kind = random.choices(kinds, [left.get(kind, 0) if counts else WEIGHTS[kind] for kind in kinds])[0]
        if kind in left:
            left[kind] -= 1
            left = {name: count for name, count in left.items() if count}
        harness.wait(random.random() * 0.05)
        harness.fault(kind)
        if kind == "pause" or random.random() < 0.3:
            harness.wait(random.choice((0.0, 0.2, 1.0)))  # The next fault may hit a process that has just started.
        else:
            harness.wait_for_steps(random.choice((1, 2, 4)))


def failpoints(harness: Harness, passes: int) -> None:
    """At each of the first `passes` passes of each failpoint in turn: crash, lose the power, restart, go on.

    Raises:
        TimeoutExpired: the server did not pass the failpoint.
    """
    for point in POINTS:
        for count in range(1, passes + 1):
            harness.wait_for_steps(1)
            harness.kill("server")
            replace(harness.settings, failpoint=point, failpoint_count=count).save()
            harness.start("server")
            harness.processes["server"].wait(harness.drain_s)
            harness.faults[point] += 1
            harness.lost_bytes += lose_power(harness.settings.journal, harness.random)
            harness.settings.save()
    harness.wait_for_steps(2)


def describe(name: str, verdict: Verdict) -> str:
    bad = {
        k: getattr(verdict, k) for k in ("lost", "twice", "fenced", "split", "audit", "wrong") if getattr(verdict, k)
    }
    return (
        f"{name}; inserts {verdict.invoked}, acknowledged {verdict.acked}, too late {verdict.late}, "
        f"outcome unknown {verdict.unknown}; "
        f"steps {verdict.steps}, groups trained {verdict.trained} (in {verdict.trained_in} steps, retired "
        f"{verdict.retired}), learner restarts {verdict.rollbacks}, "
        f"max staleness {verdict.max_staleness}; lost {len(verdict.lost)}, trained twice {len(verdict.twice)}, "
        f"fenced data trained {len(verdict.fenced)}, split {len(verdict.split)}, "
        f"audit {'DOES NOT BALANCE' if verdict.audit else 'balances'}: {f'FAIL {bad}' if bad else 'PASS'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos for the replay.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--counts", default="", help=f"fault=number,...: {' '.join(WEIGHTS)}")
    parser.add_argument("--failpoints", type=int, default=0, metavar="N")
    parser.add_argument("--uses", type=int, default=1, metavar="K", help="steps that a group is trained in")
    parser.add_argument("--mutant", default="")
    parser.add_argument("--folder", default="", help="where logs, histories and journal stay; default: deleted")
    parser.add_argument("--drain", type=float, default=DRAIN_S, help="seconds without a step that are a failure")
    given = parser.parse_args()
    counts = {
        name: int(number) for name, _, number in (item.partition("=") for item in given.counts.split(",") if item)
    }
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        settings = ChaosSettings(
            folder=given.folder or str(Path(scratch) / "run"),
            address=free_address(),
            listen="" if given.failpoints else free_address(),
            sync_delay_s=0.01,
            uses=given.uses,
            mutant=given.mutant,
        )
        with running(settings, given.seed, given.drain) as harness:
            if given.failpoints:
                failpoints(harness, given.failpoints)
            else:
                chaos(harness, Random(given.seed), seconds=given.seconds, counts=counts)
            verdict = harness.finish()
        faults = ", ".join(f"{name} {count}" for name, count in sorted(harness.faults.items()))
        print(describe(f"faults: {faults}; {harness.lost_bytes} un-synced bytes destroyed", verdict))
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
