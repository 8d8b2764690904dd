"""Compare the files of a run folder with each other: journal, ledger, metrics, checkpoint and exports each record how
far the run got. Used before a resume starts anything, and by `asyncrl audit`.

A contradiction that would affect a resume is refused, naming the files. What is only missing, or can be made again, is
reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import JOURNAL_DIR
from asyncrl.errors import AsyncRLError, CheckpointError, RunFolderError
from asyncrl.replay.audit.ledger_file import LEDGER_FILE
from asyncrl.replay.audit.report import unread
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.durable import recover
from asyncrl.replay.journal.segments import HEAD_FILE, REPAIR, read_head, segment_numbers
from asyncrl.storage.checkpoints import BRANCH_FILE, CHECKPOINT_DIR, RUN_FILE, newest_proven, position_of
from asyncrl.storage.lines import Lines, Row, read_parts
from asyncrl.storage.sealed import MANIFEST, is_sealed, verify_export
from asyncrl.telemetry.folder.resumed import CONFIG_FILE
from asyncrl.telemetry.folder.run_folder import config_note, owner_of
from asyncrl.telemetry.metrics.log import METRICS_FILE

EXPORTS = ("hf", "critic", "adapter")
ASKED = ("restore", "trained", "committed", "finished")
"""Events of the ledger that the learner requested. It requests the next once the previous one is durable."""


@dataclass(slots=True)
class Findings:
    """What was found in a run folder."""

    refusals: list[str] = field(default_factory=list)
    """Reasons why a run must not continue in this folder as it is."""
    unread: list[str] = field(default_factory=list)
    """What the system did not let this process read. Files are compared only if all could be."""
    notes: list[str] = field(default_factory=list)
    """What is missing or damaged and only reported."""
    checkpoint: Path | None = None
    """Checkpoint that `resume=auto` continues from."""
    bare: str = ""
    """Why `resume=auto` cannot continue, if there is no checkpoint; else empty."""


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """How far a journal goes."""

    steps: int
    committed_steps: int
    version: int
    events: int
    first_event: int
    """Number of the first event that it still has, not counting the snapshot before it."""


def examine(folder: Path) -> Findings:
    """Read everything that a run left in `folder`, and compare it."""
    found = Findings()
    refusals = found.refusals
    journal = _attempt(found, refusals, lambda: journal_end(folder / JOURNAL_DIR, found.notes))
    known = len(refusals)
    begins = found.checkpoint = _attempt(found, refusals, lambda: newest_proven(folder, found.notes.append))
    broken = len(refusals) > known
    checkpoint = _attempt(found, refusals, lambda: position_of(begins)) if begins is not None else None
    for name in (RUN_FILE, CONFIG_FILE):
        _attempt(found, refusals, lambda path=folder / name: _open(path))
    lines: dict[str, Lines[Row]] = {}
    for name in (METRICS_FILE, LEDGER_FILE):
        try:
            lines[name] = read_parts(folder / name, _compared, chained=name == LEDGER_FILE)
        except PermissionError as error:
            found.unread.append(unread(error))
    if not found.unread:
        _compare(folder, found, journal, checkpoint, lines, broken=broken)
    for name in EXPORTS:
        _attempt(found, found.notes, lambda path=folder / name: _check_export(path))
    return found


def _open(path: Path) -> None:
    """Raises PermissionError: it may not be read."""
    if path.exists():
        path.open("rb").close()


def _compare(
    folder: Path,
    found: Findings,
    journal: JournalEnd | None,
    checkpoint: tuple[int, int] | None,
    lines: Mapping[str, Lines[Row]],
    *,
    broken: bool,
) -> None:
    """Args: broken: there are checkpoints, but the newest is damaged."""
    if said := config_note(folder):
        found.notes.append(said)
    found.notes += _gone(folder)
    metrics, ledger = lines[METRICS_FILE], lines[LEDGER_FILE]
    if said := ledger.problem(folder / LEDGER_FILE):
        found.notes.append(said)
    if journal is not None:
        found.refusals += _lost(folder, journal, metrics, ledger, checkpoint)
        found.notes += _behind(folder, journal, ledger, checkpoint)
        found.bare = _bare(folder, journal) if found.checkpoint is None and not broken else ""
    elif checkpoint is not None and not found.refusals:
        found.notes.append(
            f"there is no journal in {folder / JOURNAL_DIR}. The steps before the checkpoint of step {checkpoint[0]} "
            "are taken from it unverified, and the groups after it are generated again"
        )


def _check_export(path: Path) -> None:
    """Raises CheckpointError: it is damaged, or cannot be verified."""
    if is_sealed(path):
        verify_export(path)
    elif path.is_dir():
        _open(path / MANIFEST)
        raise CheckpointError(
            f"{path / MANIFEST} is missing or damaged, so the content of {path.name}/ cannot be verified"
        )


def _compared(row: Row) -> Row:
    """Return the fields that are compared with other files; the rest is dropped, as rows are long."""
    return {name: row[name] for name in ("step", "policy_version", "n", "event") if name in row}


def refuse_damaged(folder: Path, resume: str, say: Callable[[str], None]) -> Path | None:
    """Check `folder` before a resume, and pass each note to `say`.

    Args:
        resume: the setting `resume`.

    Returns:
        The checkpoint that `resume=auto` continues from.

    Raises:
        RunFolderError: the run must not continue here; the message has all reasons.
    """
    found = examine(folder)
    for note in found.notes:
        say(note)
    if found.bare and resume == "auto":
        found.refusals.append(found.bare)
    if found.refusals or found.unread:
        raise RunFolderError("\n".join([*found.refusals, *found.unread]))
    return found.checkpoint


def tell(run: Path, told: str = "") -> int:
    """Print the findings for a run folder, except `told`, which the caller has printed. Returns 1 if files
    contradict each other, 2 if some could not be read, else 0."""
    if run.name == JOURNAL_DIR:
        return 0
    found = examine(run)
    for note in filter(None, (*found.notes, found.bare)):
        print(f"note: {note}", file=sys.stderr)
    for refusal in found.refusals:
        if refusal != told:
            print(f"CONTRADICTION: {refusal}", file=sys.stderr)
    for closed in found.unread:
        if closed != told:
            print(f"NOT CHECKED: {closed}", file=sys.stderr)
    return 1 if found.refusals else 2 if found.unread else 0


def journal_end(folder: Path, notes: list[str]) -> JournalEnd | None:
    """Return how far the journal in `folder` goes; None if there is none. Raises JournalError."""
    if not folder.is_dir():
        return None
    disk = FolderDisk(folder, locked=False)
    if segment_numbers(disk) and read_head(disk) is None:
        notes.append(
            f"{folder / HEAD_FILE} is missing or damaged, so it cannot be verified that no newer segment is missing"
        )
    counts: list[int] = []

    def replayed(count: int, _: ev.Event) -> None:
        counts.append(count)

    try:
        recovered = recover(disk, replayed)
    finally:
        disk.close()
    if recovered is None:
        return None
    state = recovered.state
    return JournalEnd(
        steps=state.trained_steps,
        committed_steps=state.committed_step + 1,
        version=state.tree.newest,
        events=state.applied,
        first_event=counts[0] if counts else 0,
    )


def _lost(
    folder: Path, journal: JournalEnd, metrics: Lines[Row], ledger: Lines[Row], checkpoint: tuple[int, int] | None
) -> Iterator[str]:
    """Yield what other files contain and the journal lacks. They were written once it was durable in the journal, so
    the journal has lost its end."""
    ends = f"the journal in {folder / JOURNAL_DIR} ends at step {journal.steps}, version {journal.version}"
    way_out = f"so its end is lost. {REPAIR}"
    versions = [row["policy_version"] for row in metrics.rows if isinstance(row.get("policy_version"), int)]
    if versions and max(versions) > journal.version:
        yield f"{ends}, but {folder / METRICS_FILE} has version {max(versions)}, {way_out}"
    if checkpoint is not None and (checkpoint[0] > journal.steps or checkpoint[1] > journal.version):
        yield f"{ends}, but the newest checkpoint is of step {checkpoint[0]}, version {checkpoint[1]}, {way_out}"
    asked = [row["n"] for row in _last_history(ledger) if row.get("event") in ASKED]
    if len(asked) > 1 and asked[-2] > journal.events:
        yield f"{ends}, event {journal.events}, but {folder / LEDGER_FILE} has event {asked[-2]}, {way_out}"


def _last_history(ledger: Lines[Row]) -> list[dict[str, Any]]:
    """Return the lines since the event numbers last started again, with a new journal."""
    rows = [row for row in ledger.rows if isinstance(row.get("n"), int)]
    begins = max((place for place in range(1, len(rows)) if rows[place]["n"] <= rows[place - 1]["n"]), default=0)
    return rows[begins:]


def _behind(folder: Path, journal: JournalEnd, ledger: Lines[Row], checkpoint: tuple[int, int] | None) -> Iterator[str]:
    """Yield what the journal contains and other files lack."""
    if checkpoint is not None and journal.committed_steps > checkpoint[0]:
        yield (
            f"the journal knows of a checkpoint of step {journal.committed_steps}, but the newest in "
            f"{folder / CHECKPOINT_DIR} is of step {checkpoint[0]}. A resume goes back to it"
        )
    rows = _last_history(ledger)
    last = rows[-1]["n"] if rows else 0
    if last < journal.first_event - 1:
        yield (
            f"{folder / LEDGER_FILE} ends at event {last}, but the journal begins with event {journal.first_event}. "
            "The lines between are lost"
        )


def _gone(folder: Path) -> Iterator[str]:
    """Yield what is missing of a folder that a run has prepared."""
    if not (folder / CONFIG_FILE).exists():
        return
    if owner_of(folder) is None:
        yield (
            f"{folder / RUN_FILE} is missing or damaged: it says whose run this is, and no resume goes on without it. "
            "Restore it from a copy"
        )
    if not (folder / LEDGER_FILE).exists():
        yield f"{folder / LEDGER_FILE} is missing: a resume writes again what the journal still has"


def _bare(folder: Path, journal: JournalEnd) -> str:
    """Return why a resume without a checkpoint is impossible: the replay has forgotten the steps before the last
    checkpoint. Empty if it is possible; for a fork see `refuse_bare_fork`."""
    if not journal.committed_steps or (folder / CHECKPOINT_DIR / BRANCH_FILE).exists():
        return ""
    return (
        f"the journal knows of a checkpoint of step {journal.committed_steps}, but there is none in "
        f"{folder / CHECKPOINT_DIR}, so resume=auto has nothing to continue from. Restore it from a copy, give "
        "another checkpoint with resume=PATH, or start again with overwrite=true"
    )


Result = TypeVar("Result")


def _attempt(found: Findings, problems: list[str], call: Callable[[], Result]) -> Result | None:
    """Call it. What it finds wrong goes to `problems`; that a file cannot be read is no finding about the run."""
    try:
        return call()
    except AsyncRLError as error:
        problems.append(str(error))
    except OSError as error:
        found.unread.append(unread(error))
    return None
