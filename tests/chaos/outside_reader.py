"""Read and judge a run folder without asyncrl: the judge of `outside.py` shares no code with what it judges.

ledger.jsonl    what happened to every group, in order, with the restores of the learner
metrics.jsonl   the rows of the surviving history
journal/        segments of records: magic, size, segment, synced, checksum, msgpack [schema, kind, fields]
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

HEADER = struct.Struct("<4sIIIQQ")
MAGIC = b"aRJ\x01"


@dataclass
class Findings:
    """Findings about one run. Counts are groups unless named otherwise."""

    acknowledged: int = 0
    trained: int = 0
    steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    twice: int = 0
    """Trained in more steps than asked for."""
    trained_in: dict[int, int] = field(default_factory=dict)
    """Number of steps -> number of groups that the surviving history trained in that many steps."""
    retired: int = 0
    """Trained in fewer steps than asked for, and retired according to the ledger."""
    restores: int = 0
    """Number of restores that undid trained steps."""
    undone: int = 0
    """Groups that restores undid: trained after the restored checkpoint."""
    trained_again: int = 0
    """The undone groups that the surviving history trained."""
    lowest_share: float = 1.0
    """Lowest share of undone groups trained again, over the restores."""
    steps_undone: int = 0
    steps_same: int = 0
    """Undone steps that were trained again with the same groups in the same order."""
    broken: list[str] = field(default_factory=list)
    """Violated rules, in words."""

    @property
    def share(self) -> float:
        return self.trained_again / self.undone if self.undone else 1.0


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the complete lines of a JSON lines file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def records(journal: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield `(kind, fields)` of every record in the unbroken chain from each segment's start, oldest first."""
    for path in sorted(journal.glob("*.seg")):
        data, offset, number = path.read_bytes(), 0, int(path.stem)
        while offset + HEADER.size <= len(data):
            magic, size, segment, _, _, _ = HEADER.unpack_from(data, offset)
            if magic != MAGIC or segment != number:
                break
            body = data[offset + HEADER.size : offset + HEADER.size + size]
            offset = (offset + HEADER.size + size + 7) // 8 * 8
            if body:
                length = int.from_bytes(body[:4], "little")
                _, kind, values = msgpack.unpackb(body[4 : 4 + length], strict_map_key=False)
                yield kind, values


def judge(folder: Path, bound: int, uses: int = 1) -> Findings:
    """Judge a finished run: every group it accepted is trained in `uses` steps, or dropped or retired."""
    found = Findings()
    ledger = rows(folder / "ledger.jsonl")
    _conserved(found, ledger, uses)
    _trained_again(found, ledger)
    _compare_journal(found, ledger, folder / "journal")
    _compare_metrics(found, rows(folder / "metrics.jsonl"), bound)
    return found


def _conserved(found: Findings, ledger: list[dict[str, Any]], uses: int) -> None:
    inserted = {line["group"] for line in ledger if line["event"] == "inserted"}
    dropped = {line["group"]: line["reason"] for line in ledger if line["event"] == "dropped"}
    steps = surviving(ledger)
    places: dict[int, list[int]] = {}
    for step, groups in steps.items():
        for group in groups:
            places.setdefault(group, []).append(step)
    found.acknowledged, found.trained, found.steps = len(inserted), len(places), len(steps)
    found.twice = sum(len(where) > uses or len(set(where)) < len(where) for where in places.values())
    retired = {line["group"] for line in ledger if line["event"] == "retired"}
    short = {group for group, where in places.items() if len(where) < uses}
    found.trained_in = dict(Counter(len(where) for where in places.values()))
    found.retired = len(short & retired)
    if short - retired:
        found.broken.append(f"groups {sorted(short - retired)[:5]} were trained in fewer than {uses} steps")
    found.lost = len(inserted - set(places) - set(dropped))
    for group in inserted & set(dropped):
        found.dropped[dropped[group]] = found.dropped.get(dropped[group], 0) + 1
    if both := set(places) & set(dropped):
        found.broken.append(f"groups {sorted(both)[:5]} were trained and dropped")
    if sorted(steps) != list(range(len(steps))):
        found.broken.append(f"{len(steps)} steps survive, and they are not 0 to {len(steps) - 1}")


def surviving(ledger: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return step -> groups, without the steps that a restore undid."""
    steps: dict[int, list[int]] = {}
    for line in ledger:
        if line["event"] == "restore":
            steps = {step: groups for step, groups in steps.items() if step < line["next_step"]}
        elif line["event"] == "trained":
            steps[line["step"]] = line["groups"]
    return steps


def _trained_again(found: Findings, ledger: list[dict[str, Any]]) -> None:
    final = surviving(ledger)
    everything = {group for groups in final.values() for group in groups}
    steps: dict[int, list[int]] = {}
    for line in ledger:
        if line["event"] == "trained":
            steps[line["step"]] = line["groups"]
        if line["event"] != "restore":
            continue
        undone = {step: groups for step, groups in steps.items() if step >= line["next_step"]}
        steps = {step: groups for step, groups in steps.items() if step < line["next_step"]}
        groups = {group for members in undone.values() for group in members}
        if groups:
            again = len(groups & everything)
            found.restores, found.undone = found.restores + 1, found.undone + len(groups)
            found.trained_again += again
            found.lowest_share = min(found.lowest_share, again / len(groups))
            found.steps_undone += len(undone)
            found.steps_same += sum(final.get(step) == members for step, members in undone.items())


def _compare_journal(found: Findings, ledger: list[dict[str, Any]], journal: Path) -> None:
    """Check that ledger and journal have the same groups and trained steps, and that no version was published twice."""
    inserted: set[int] = set()
    trained: list[tuple[int, int]] = []
    versions: list[int] = []
    for kind, values in records(journal):
        if kind == "Inserted":
            _, packed = values[0]
            inserted.add(msgpack.unpackb(packed)[0])
        elif kind == "Trained":
            trained.append((values[0], values[1]))
        if kind in ("Trained", "Published"):
            versions.append(values[1] if kind == "Trained" else values[0])
    told = [(line["step"], line["policy_version"]) for line in ledger if line["event"] == "trained"]
    if trained != told:
        found.broken.append(f"the journal has {len(trained)} trained steps, the ledger {len(told)}, not the same ones")
    if inserted != {line["group"] for line in ledger if line["event"] == "inserted"}:
        found.broken.append("the journal and the ledger differ in the groups they took in")
    if versions != sorted(set(versions)):
        found.broken.append("a policy version was published twice")


def _compare_metrics(found: Findings, metrics: list[dict[str, Any]], bound: int) -> None:
    metrics = [row for row in metrics if "staleness/max" in row]  # evaluations have rows of their own
    numbers = [row["step"] for row in metrics]
    if numbers != list(range(1, found.steps + 1)):
        found.broken.append(f"metrics.jsonl has {len(numbers)} rows, not one for each of {found.steps} steps in order")
    versions = [row["policy_version"] for row in metrics]
    if versions != sorted(set(versions)):
        found.broken.append("metrics.jsonl has a policy version twice")
    if any(row["staleness/max"] > bound for row in metrics):
        found.broken.append(f"metrics.jsonl has a staleness over {bound}")
