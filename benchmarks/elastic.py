"""Does throughput follow when a second pool of rollout workers joins a running job and leaves again?

    python -m benchmarks.elastic [--seconds 30] [key=value ...]

Rewards wait (`parts/waiting_reward.py`: 0.1 s per completion, in two reward processes per worker), so that neither the
engine nor the cores are the limit: a pool makes at most 5 groups of 4 per second, whatever the machine. The pools are
`asyncrl local` and `asyncrl rollout`, as a user starts them. Prints one JSON line: groups trained per second before,
with, and after the second pool, and what `asyncrl audit` says about the run.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.running import Running

GROUPS_PER_STEP = 8


class Job(Running):
    """A running `asyncrl local` and the pools that join it."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        settings = [
            f"reward.function={Path(__file__).parent / 'parts' / 'waiting_reward.py'}:score",
            *("reward.workers=2", "rollout.host=process", "rollout.workers=1", "rollout.group_size=4"),
            *("rollout.max_in_flight=48", "rollout.max_new_tokens=8", "data.max_prompt_tokens=32"),
            *(f"learner.groups_per_step={GROUPS_PER_STEP}", "learner.max_tokens_per_microbatch=1024"),
            "replay.journal.retain=all",
        ]
        super().__init__(folder, [*settings, *overrides])
        self.start("local")

    def wait_workers(self, count: int, settle: int) -> None:
        self.wait(lambda: [row["replay/workers"] for row in self.rows()[-1:]] == [count], f"{count} workers")
        seen = self.rows()[-1]["step"]  # groups made before the change are still in the buffer
        self.wait(lambda: self.rows()[-1]["step"] >= seen + settle, f"{settle} more steps")

    def groups_per_s(self, seconds: float) -> float:
        """Return the groups trained per second over the steps of the next `seconds`."""
        first = self.rows()[-1]
        time.sleep(seconds)
        last = self.rows()[-1]
        return GROUPS_PER_STEP * (last["step"] - first["step"]) / (last["time"] - first["time"])

    def stop(self) -> dict[str, Any]:
        """Stop the run. Returns what its audit finds."""
        self.end("local")
        audit = self.audit()
        return {"audit_exit_code": audit.returncode, "audit": audit.stdout.strip().splitlines()[-1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=int, default=5, help="steps after a change before the clock starts")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"seconds": 4.0, "settle": 1})
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), given.overrides)
        found: dict[str, Any] = {}
        try:
            job.wait_workers(1, given.settle)
            found["before"] = job.groups_per_s(given.seconds)
            job.start("rollout")
            try:
                job.wait_workers(2, given.settle)
                found["with_second_pool"] = job.groups_per_s(given.seconds)
            finally:
                job.end("rollout", signal.SIGTERM)
            job.wait_workers(1, given.settle)
            found["after"] = job.groups_per_s(given.seconds)
        finally:
            found |= job.stop()
    rates = {name: round(value, 2) for name, value in found.items() if isinstance(value, float)}
    gain = round(rates["with_second_pool"] / rates["before"], 2)
    answer("elastic", {**found, **rates, "gain": gain}, smoke=given.smoke)


if __name__ == "__main__":
    main()
