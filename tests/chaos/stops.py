"""Stop each role in turn (SIGSTOP), with the shipped heartbeat settings: `python -m tests.chaos.stops --seconds 30`.

For each role it prints after how many seconds the others named it, how long after its resumption the next step was
trained, and the verdict over the whole run.

    stopped    named by
    worker     the server, which gives its assignments to others
    server     every worker and the learner, which reconnect
    learner    the server, and the workers, which say what they wait for
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.settings.replay import ReplayConfig
from tests.addresses import free_address

from .check import Verdict
from .harness import DRAIN_S, Harness, running
from .settings import ChaosSettings

ROLES = ("w0", "server", "learner")
SILENT_SERVER = "no word from the replay server"


@dataclass(slots=True, kw_only=True)
class Stopped:
    role: str
    named: dict[str, float] = field(default_factory=dict)
    """Name of a process -> seconds from the stop until it named the stopped role."""
    next_step_s: float = 0.0
    """Seconds from the end of the stop to the next trained step."""
    accused: int
    """How often the role, once resumed, wrongly reported others as silent: it was silent itself."""
    verdict: Verdict

    def describe(self) -> str:
        named = ", ".join(f"{who} after {seconds:.1f} s" for who, seconds in self.named.items()) or "nobody"
        judged = "PASS" if self.verdict.passed else f"FAIL {self.verdict}"
        return (
            f"{self.role} stopped: named by {named}; next step {self.next_step_s:.1f} s after it ran again, "
            f"took others for silent {self.accused} times; steps "
            f"{self.verdict.steps}, acknowledged {self.verdict.acked}, too late {self.verdict.late}, max staleness "
            f"{self.verdict.max_staleness}, learner restarts {self.verdict.rollbacks}: {judged}"
        )


def witnesses(harness: Harness, role: str) -> dict[str, Callable[[], bool]]:
    """Return the processes that should name the stopped role, each with a function that tells whether it has since this
    call."""
    workers = [name for name in harness.names if name.startswith("w") and name != role]

    def says(name: str, text: str) -> Callable[[], bool]:
        before = harness.said(name).count(text)
        return lambda: harness.said(name).count(text) > before

    def waits(name: str) -> Callable[[], bool]:
        return lambda: last_wait(harness, name).startswith("the learner")

    if role == "server":
        return {name: says(name, SILENT_SERVER) for name in (*workers, "learner")}
    if role == "learner":
        return {"server": says("server", "learner rank 0 was silent"), **{name: waits(name) for name in workers}}
    return {"server": says("server", f"worker {role} was silent")}


def last_wait(harness: Harness, worker: str) -> str:
    waits = [row["waiting_for"] for row in harness.noted_by(worker) if row["what"] == "waits"]
    return waits[-1] if waits else ""


def stop(settings: ChaosSettings, role: str, seconds: float, patience_s: float) -> Stopped:
    """Run once: stop `role`, a worker at a moment when it leaves work undone; then resume it, finish and judge.

    The stop lasts at least `seconds`, and beyond that until every witness has named the role, at most `patience_s`.
    """
    with running(settings, seed=0, drain_s=max(DRAIN_S, 4 * seconds)) as harness:
        harness.wait_for_worker("w0")
        harness.wait_for_steps(2)
        if role == "w0":
            harness.wait_for_order(role)
        missing = witnesses(harness, role)
        named: dict[str, float] = {}
        harness.pause(role, max(seconds, patience_s))
        stopped_at = time.monotonic()
        while role in harness.paused:
            for who in [who for who, names in missing.items() if names()]:
                named[who] = time.monotonic() - stopped_at
                del missing[who]
            if not missing and time.monotonic() - stopped_at > seconds:
                harness.pause(role, 0)
            harness.wait(0.02)
        said = len(harness.said(role))
        resumed_at, trained = time.monotonic(), harness.seen("trained")
        harness.wait_until(lambda: harness.seen("trained") > trained, "no step was trained after it")
        next_step_s = time.monotonic() - resumed_at
        harness.wait_for_steps(4)
        accused = sum(harness.said(role)[said:].count(text) for text in (SILENT_SERVER, "was silent"))
        verdict = harness.finish()
        return Stopped(role=role, named=named, next_step_s=next_step_s, accused=accused, verdict=verdict)


def settings_for(folder: Path, heartbeat_s: float, silence_s: float) -> ChaosSettings:
    return ChaosSettings(
        folder=str(folder), address=free_address(), heartbeat_s=heartbeat_s, silence_s=silence_s, slowest_s=1.0
    )


def main() -> int:
    shipped = ReplayConfig()
    parser = argparse.ArgumentParser(description="Stop every role for a while.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--heartbeat", type=float, default=shipped.heartbeat_s)
    parser.add_argument("--silence", type=float, default=shipped.heartbeat_timeout_s)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES)
    given = parser.parse_args()
    failed = False
    for role in given.roles:
        with tempfile.TemporaryDirectory(prefix="stops-") as scratch:
            found = stop(
                settings_for(Path(scratch) / "run", given.heartbeat, given.silence), role, given.seconds, given.seconds
            )
        print(found.describe(), flush=True)
        failed |= not found.verdict.passed or not found.named
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
