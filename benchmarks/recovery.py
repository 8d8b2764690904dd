"""How long does a restarted replay server take to read its journal?

    python -m benchmarks.recovery [--mb 1074] [--tokens 8192] [--repeats 3]

Writes `--mb` MB of groups, then opens the journal in a process of its own. Measures two cases: every group still
needed, and all groups trained and committed. The files are in the page cache, as after a killed process. Prints one
JSON line: seconds until the core is recovered, MB of files, peak memory of the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from asyncrl.replay.codec.group import encode_group, split_frames
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.durable import open_core
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.types import NO_VERSION
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.measuring import GROUP_SIZE, Size, make_group, make_trajectories

GROUPS_PER_STEP = 8
SMOKE = {"mb": 4, "tokens": 256, "repeats": 1}
RUN = {"run_id": "bench", "run_digest": "d", "boot": "b"}
WORKER = ("worker", "first")
LEARNER = "learner"


def admission(groups: int) -> AdmissionSettings:
    ahead = groups // GROUPS_PER_STEP + 1
    return AdmissionSettings(
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_staleness=1 << 20,
        pipeline_depth=ahead,
        max_in_flight=groups + GROUPS_PER_STEP,
    )


def open_journal(folder: Path, groups: int) -> tuple[ReplayCore, Journal]:
    disk = FolderDisk(folder, locked=True)
    settings = JournalSettings()
    return open_core(disk, admission(groups), time.monotonic, journal=settings, run=RUN, max_bytes=1 << 40)


def write_journal(folder: Path, size: Size, groups: int, commit: bool) -> None:
    core, journal = open_journal(folder, groups)
    core.hello(*WORKER)
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation=LEARNER)
    core.publish(policy_version=0, parent=NO_VERSION)
    core.served(*WORKER, 0, "f")
    trajectories = make_trajectories(size)
    for order in core.acquire(*WORKER, slots=groups).assignments:
        encoded = encode_group(make_group(trajectories, order))
        core.insert(*WORKER, encoded.header, split_frames(encoded.header, encoded.frames))
        journal.write_batch()
    for step in range(groups // GROUPS_PER_STEP if commit else 0):
        if core.lease(step) is None:
            raise SystemExit(f"step {step} has no groups")
        core.trained(step=step, policy_version=step + 1)
        core.commit(step)
        journal.write_batch()
    journal.close()


def recover(folder: Path, groups: int, answer: Connection) -> None:
    started = time.perf_counter()
    core, journal = open_journal(folder, groups)
    seconds = time.perf_counter() - started
    stored = core.state.buffer.nbytes
    journal.close()
    status = Path("/proc/self/status").read_text()  # getrusage would give the parent's peak
    peak_mb = int(status.split("VmHWM:")[1].split()[0]) / 1024
    answer.send({"seconds": seconds, "stored_mb": stored / 1e6, "peak_mb": peak_mb})


def measure(size: Size, groups: int, commit: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        folder = Path(name) / "journal"
        write_journal(folder, size, groups, commit)
        file_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=recover, args=(folder, groups, theirs))
        process.start()
        if not ours.poll(300):
            raise SystemExit("the journal was not read back within 300 s")
        row = ours.recv()
        process.join(30)
    return row | {"file_mb": file_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1074)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    options = parse(parser, SMOKE)
    size = Size(options.tokens)
    nbytes = encode_group(make_group(make_trajectories(size))).header.nbytes
    groups = max(1, options.mb * 1_000_000 // nbytes // GROUPS_PER_STEP) * GROUPS_PER_STEP
    found: dict[str, object] = {"groups": groups}
    for name, commit in (("needed", False), ("committed", True)):
        rows = [measure(size, groups, commit) for _ in range(options.repeats)]
        found[name] = {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
    answer("recovery", found, smoke=options.smoke)


if __name__ == "__main__":
    main()
