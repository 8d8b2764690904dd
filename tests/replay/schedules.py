"""So many random schedules of the replay, judged by the oracle (see `simulator.py`), and how many they were.

    python -m tests.replay.schedules --admission sample|window|any [--count 100000] [--seed 0] [--file FILE]

Half of them roll back: learners crash and go back to checkpoints. One JSON line is printed; the first broken promise
ends the command with its traceback, which names the schedule. Each finished thousand is a line of the file, and is not
run again: a command that was stopped goes on, and one that had finished tells the same again.
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

from tests.replay.simulator import Simulation, run_schedule

ADMISSIONS: dict[str, dict[str, Any]] = {"sample": {"by_sample": True}, "window": {"window": True}, "any": {}}
CHUNK, ACTIONS = 1_000, 100
CPU = "CPU seconds"


def counts(simulation: Simulation) -> Counter[str]:
    """What of a schedule was judged."""
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
    """The schedules of `CHUNK` seeds."""
    began, total = time.process_time(), Counter[str]()
    for seed in range(first, first + CHUNK):
        total += counts(run_schedule(seed, ACTIONS, rollbacks=seed % 2 == 0, **ADMISSIONS[admission]))
    return {"admission": admission, "first": first, CPU: round(time.process_time() - began, 1), **total}


def finished(path: Path | None) -> Iterator[dict[str, Any]]:
    """Chunks in the file; a line that a killed command left unfinished counts for nothing."""
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
    # Spawned: the children import what is on the disk, as a command given again would.
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for chunk in pool.map(partial(run_chunk, given.admission), [each for each in chunks if each not in done]):
            done[chunk["first"]] = chunk
            if given.file is not None:
                with given.file.open("a") as file:
                    file.write(json.dumps(chunk) + "\n")
                    os.fsync(file.fileno())
    print(json.dumps(told(given.admission, list(done.values()))))


def told(admission: str, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over chunks; 0 broken promises, or there would be no line."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk if name not in ("admission", "first"))
    sums = {name: sum(chunk.get(name, 0) for chunk in chunks) for name in names}
    return {"admission": admission, "broken": 0, **sums, CPU: round(sums[CPU])}


if __name__ == "__main__":
    main()
