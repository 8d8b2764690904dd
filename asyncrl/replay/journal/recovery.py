"""Reading a journal: the whole retained history, or just what a restarted server needs.

segments   41 ──▶ 42 ──▶ 43      each begins with a snapshot of all that came before it, payloads excepted
recovery   snapshot of 43, its events, and the payloads that it points to, wherever they lie
history    snapshot of 41, then the events of all three
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError, WireError
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.disk import Disk, FolderDisk
from asyncrl.replay.journal.records import KINDS, decode_event
from asyncrl.replay.journal.segments import (
    HEAD_FILE,
    REPAIR,
    Record,
    damaged,
    position_of,
    read_at,
    read_head,
    scan,
    segment_name,
    segment_numbers,
    segment_of,
)


@dataclass(frozen=True, slots=True)
class Begun:
    """A segment whose first record is whole."""

    number: int
    snapshot: ev.Snapshotted


def read_journal(path: Path) -> Iterator[tuple[int, ev.Event]]:
    """Everything retained in the journal folder `path`, oldest first: `(position, event)`.

    The first event is a `Snapshotted`: the state the rest builds on, empty when the journal reaches back to the start
    of the run. Inserted events carry their payloads. Settings that only the head of a later segment tells are a
    `Configured` at its position.

    Raises:
        JournalError: there is no journal, or it is damaged; the message names file and byte.
    """
    if not path.is_dir():
        raise JournalError(f"{path} is not a folder: this run has no journal (replay.durability=memory keeps none)")
    yield from read_history(FolderDisk(path, locked=False))


def read_history(disk: Disk) -> Iterator[tuple[int, ev.Event]]:
    """`read_journal` on any disk."""
    chain = segment_chain(disk)
    if not chain:
        raise JournalError("the journal holds no finished record, so nothing was made durable yet")
    in_force = chain[0].snapshot.run.get("settings")
    for segment, record in records_of(disk, chain):
        head, told = position_of(segment.number, 0), segment.snapshot.run.get("settings")
        if not record.body or (segment is not chain[0] and record.position == head):
            continue
        event = decode_record(record)
        if isinstance(event, ev.Configured):
            in_force = event.settings
        elif told is not None and told != in_force:
            # The server that changed them died when the head of its segment was durable, and its own word not.
            in_force = told
            yield head, ev.Configured(told)
        yield record.position, event


def records_of(disk: Disk, chain: Sequence[Begun]) -> Iterator[tuple[Begun, Record]]:
    """The records of a chain of segments, each with its segment. Raises JournalError: a segment is damaged."""
    for segment, following in itertools.zip_longest(chain, chain[1:]):
        end = None if following is None else following.snapshot.previous_end
        for record in scan(disk, segment.number, end):
            yield segment, record


def segment_chain(disk: Disk) -> list[Begun]:
    """The newest segments that follow each other without a gap; older ones are remains of recycling. Empty when
    nothing was ever durable.

    Raises:
        JournalError: a segment that was durable has lost its beginning, or another version wrote it.
    """
    return chain_of(disk, begun_segments(disk))


def chain_of(disk: Disk, whole: Iterable[Begun]) -> list[Begun]:
    """`segment_chain`, of the disk's segments that have a whole first record.

    Raises:
        JournalError: a segment that was durable has lost its beginning.
    """
    numbers = segment_numbers(disk)
    begun = {segment.number: segment for segment in whole}
    for number in numbers:
        if number > max(begun, default=-1):
            collections.deque(scan(disk, number), maxlen=0)  # raises if it ever was durable
    newest, head = max(begun, default=-1), read_head(disk)
    if head is not None and head > newest:
        raise JournalError(
            f"the journal file {segment_name(head)} is missing, or damaged at byte 0: {HEAD_FILE} says that it was "
            f"durable. {REPAIR}"
        )
    chain = [begun[newest]] if begun else []
    while chain and chain[0].snapshot.previous_end >= 0:
        before = segment_of(chain[0].snapshot.previous_end)
        if before not in begun:
            if before in numbers:
                raise damaged(position_of(before, 0), "its snapshot is gone")
            break
        chain.insert(0, begun[before])
    return chain


def run_of(disk: Disk) -> str | None:
    """Id of the run whose journal is on `disk`; empty for one of another version, which no run that goes on can have,
    and None where there is none or it cannot be read."""
    try:
        begun = begun_segments(disk)
    except JournalError:
        return ""
    return begun[-1].snapshot.run.get("run_id", "") if begun else None


def unfinished_run(disk: Disk) -> str | None:
    """Id of the run whose journal is on `disk`, if the run is not over; None where nothing was ever durable, or another
    version wrote it, which no run that goes on can have.

    Raises:
        JournalError: it is damaged, so that this cannot be said.
    """
    try:
        begun = begun_segments(disk)
    except JournalError:
        return None
    chain = chain_of(disk, begun)
    finished = False
    for record in scan(disk, chain[-1].number) if chain else ():
        event = decode_record(record)
        if isinstance(event, ev.Snapshotted):
            finished = bool(event.image.get("finished"))
        elif isinstance(event, ev.Finished | ev.Restored):
            finished = isinstance(event, ev.Finished)
    return chain[-1].snapshot.run.get("run_id", "") if chain and not finished else None


def begun_segments(disk: Disk) -> list[Begun]:
    """Segments with a whole first record, by number."""
    begun = []
    for number in segment_numbers(disk):
        first = read_at(disk, position_of(number, 0))
        if first is None:
            continue
        snapshot = decode_record(first)
        if not isinstance(snapshot, ev.Snapshotted):
            raise JournalError(
                f"the journal file {segment_name(number)} does not begin with a snapshot, so it was not written by "
                "asyncrl"
            )
        # Without the image: it is applied from its record, and a long run has thousands of them.
        begun.append(Begun(number, replace(snapshot, image={})))
    return begun


def decode_record(record: Record, kinds: Mapping[str, type] = KINDS) -> Any:
    """Return the event of a record, one of `kinds` by name; None if it only marks how far all was durable. Raises
    JournalError where the bytes are whole but this program does not know them."""
    try:
        return decode_event(record.body, kinds) if record.body else None
    except WireError as error:
        name = segment_name(segment_of(record.position))
        raise JournalError(
            f"the journal file {name} cannot be read at position {record.position}: {error}. It was written by "
            "another version of asyncrl. Use that version, or start with another run.dir"
        ) from error


def read_event(disk: Disk, position: int, kinds: Mapping[str, type] = KINDS) -> Any:
    """Return the event of the record at `position`; None if no record is there. Raises JournalError as
    `decode_record`."""
    record = read_at(disk, position)
    return None if record is None else decode_record(record, kinds)
