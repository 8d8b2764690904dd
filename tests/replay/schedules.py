"""Run random schedules of the replay, judged by the oracle (see `simulator.py`), and print their counts.

    python -m tests.replay.schedules --admission sample|window|any [--count 100000] [--seed 0] [--file FILE]

In half of them learners may crash and go back to checkpoints. One JSON line is printed. The first failure ends the
command with a traceback that names the schedule. Each finished thousand is a line of the file and is not run again: a
command that was stopped resumes, and one that had finished prints the same result again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.replay.liveness import run_schedule
from tests.replay.simulator import Simulation

ADMISSIONS: dict[str, dict[str, Any]] = {"sample": {"by_sample": True}, "window": {"window": True}, "any": {}}
CHUNK, ACTIONS = 1_000, 100
CPU = "CPU seconds"


def counts(simulation: Simulation) -> Counter[str]:
    """Return counts of what was checked in a schedule."""
    ledger, meter = simulation.core.state.ledger, simulation.core.meter
    return simulation.oracle.judged + Counter(
        {
            "schedules": 1,
            "schedules that rolled back": int(simulation.oracle.rolled_back),
            "admitted": ledger.admitted,
            "dropped": sum(ledger.dropped.values()),
            "tokens masked": meter.masked_tokens,
        }
    )


def run_chunk(admission: str, first: int) -> dict[str, Any]:
    """Run the schedules of `CHUNK` seeds and return their counts."""
    began, total = time.process_time(), Counter[str]()
    for seed in range(first, first + CHUNK):
        total += counts(run_schedule(seed, ACTIONS, rollbacks=seed % 2 == 0, **ADMISSIONS[admission]))
    return {"admission": admission, "first": first, CPU: round(time.process_time() - began, 1), **total}


def finished(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the finished chunks in the file. A line that a killed command left unfinished is ignored."""
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--admission", choices=list(ADMISSIONS), required=True)
    parser.add_argument("--count", type=int, default=100_000, help="rounded up to thousands")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    chunks = range(given.seed, given.seed + given.count, CHUNK)
    done = {c["first"]: c for c in finished(given.file) if c["admission"] == given.admission and c["first"] in chunks}
    # Spawned, so that the children import the code on the disk, as a new command would.
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for chunk in pool.map(partial(run_chunk, given.admission), [each for each in chunks if each not in done]):
            done[chunk["first"]] = chunk
            if given.file is not None:
                with given.file.open("a") as file:
                    file.write(json.dumps(chunk) + "\n")
                    os.fsync(file.fileno())
    print(json.dumps(told(given.admission, list(done.values()))))


def told(admission: str, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums over the chunks. `broken` is 0: a failure would have ended the command before."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk if name not in ("admission", "first"))
    sums = {name: sum(chunk.get(name, 0) for chunk in chunks) for name in names}
    return {"admission": admission, "broken": 0, **sums, CPU: round(sums[CPU])}


if __name__ == "__main__":
    main()
