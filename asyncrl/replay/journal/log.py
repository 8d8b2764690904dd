"""The append-only journal of a run: every event a record, durable in groups, on segments that are used again.

    append(event)    the server's loop: position and bytes at once, nothing is written
    write_batch()    the journal's thread: write what was appended, sync once, free what nobody needs
    promised         end of the last appended event; a reply that rests on it may leave once `durable` reaches it

A new segment begins with a snapshot, so that older ones are needed only for the payloads that still lie in them. A
segment is written again when none does and the snapshot after it is durable. What `retain` says to keep is kept longer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.disk import Bytes, Disk
from asyncrl.replay.journal.records import encode_event
from asyncrl.replay.journal.segments import (
    BLOCK,
    HEAD_FILE,
    frame_record,
    head_text,
    offset_of,
    position_of,
    record_size,
    segment_name,
    segment_numbers,
    segment_of,
)
from asyncrl.storage.full_disk import FULL

SPARES = 2
"""Free segments kept for reuse; more are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    retain: str = "none"
    """`none`: what recovery needs; `window`: also the newest `window_bytes`; `all`: everything."""
    segment_bytes: int = 64 << 20
    window_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """To be written at `position`; up to `end`."""

    position: int
    end: int
    pieces: list[Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roll:
    """A segment begins."""

    number: int
    nbytes: int
    pinned: frozenset[int]
    """Older segments with payloads that are still needed."""
    end: int
    """Where the segment before ends."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a segment begins with."""

    body: list[Bytes]
    """Body of its first record."""
    pins: Collection[int]
    """Positions of older records that are still needed."""


@dataclass
class SegmentLog:
    """Records on segments, whatever they mean: a subclass appends them, and says what a segment begins with. One thread
    appends, one (the same, in tests) writes.

    Args:
        previous_end: where the log ended before this start; -1 for a new one.
    """

    disk: Disk
    settings: JournalSettings
    previous_end: int = -1
    promised: int = 0
    durable: int = 0
    sync_s: float = 0.0
    """How long the last sync took, without the writes before it."""
    _offset: int = 0
    _limit: int = 0
    _number: int = 0
    _floor: int = 0
    _queue: deque[_Piece | _Roll] = field(default_factory=deque)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _current: int = -1
    """Segment that the writer has open."""
    _live: list[int] = field(default_factory=list)
    """Segments before it that are kept, oldest first."""
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._live = segment_numbers(self.disk)
        self._number = max(self._live, default=-1)
        self.durable = max(self.previous_end, 0)
        self._roll(self.previous_end)

    def _opening(self, end: int) -> Opening:
        """Return the opening of the segment that begins where the previous one ends, at `end` (-1: there is none)."""
        raise NotImplementedError

    def _append(self, body: list[Bytes]) -> int:
        """Take in one record; returns its position. Durable once `durable >= promised` as it is after this call.

        Raises:
            JournalError: it is too large.
        """
        size = record_size(sum(len(piece) for piece in body))
        with self._lock:
            if self._offset + size > self._limit and self._offset > self._floor:
                self._roll(position_of(self._number, self._offset))
            piece = self._add(body)
        self.promised = piece.end
        return piece.position

    def write_batch(self) -> None:
        """Make durable what was appended so far.

        Raises:
            OSError: with an errno in `FULL`, the disk is full. JournalError: it failed in another way. What is not
                durable yet may be lost: stop, and recover.
        """
        with self._lock:
            items = list(self._queue)
        if not items:
            return
        try:
            self._write(items)
            started = time.monotonic()
            self.disk.sync(segment_name(self._current))
            self.sync_s = time.monotonic() - started
            if rolls := [item for item in items if isinstance(item, _Roll)]:
                # Beside the segments, which is the newest: one that is gone would else pass for one that never was.
                self.disk.put(HEAD_FILE, head_text(rolls[-1].number))
                self._release(rolls)
        except OSError as error:
            if error.errno in FULL:
                raise
            # After a failed sync the kernel may have dropped what it could not write; trying again would lie.
            raise JournalError(
                f"the journal file {self.writing} could not be written: {error}. Repair the disk and start again"
            ) from error
        with self._lock:
            for _ in items:
                self._queue.popleft()
        self.durable = items[-1].end
        if self.durable == self.promised:
            self._mark()

    @property
    def writing(self) -> str:
        """Name of the file that the writer has open, or is about to make."""
        return segment_name(max(self._current, 0))

    def queued_bytes(self) -> int:
        """Appended and not durable yet, the space that new segments take included."""
        with self._lock:
            return sum(item.nbytes if isinstance(item, _Roll) else sum(map(len, item.pieces)) for item in self._queue)

    def close(self) -> None:
        """Make all durable, give back the unused end of the last segment, and say in it that this is so. Raises as
        `write_batch` does."""
        with contextlib.closing(self.disk):
            self.write_batch()
            if self._current < 0:
                return
            name = segment_name(self._current)
            with self._lock:
                closing = self._add([], closes=True)
                self._queue.clear()
            try:
                self.disk.write(name, offset_of(closing.position), closing.pieces)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return  # as a killed server leaves it
            self.disk.truncate(name, self._offset)
            self.disk.sync(name)

    def _add(self, body: Sequence[Bytes], *, closes: bool = False) -> _Piece:
        """Frame and queue one record. The lock is held."""
        position = position_of(self._number, self._offset)
        synced = position + record_size(0) if closes else max(self.durable, 0)
        pieces = frame_record(position, synced, body, self._limit // BLOCK)
        self._offset += sum(len(piece) for piece in pieces)
        piece = _Piece(position=position, end=position_of(self._number, self._offset), pieces=pieces)
        self._queue.append(piece)
        return piece

    def _roll(self, end: int) -> None:
        """Begin the next segment; the one before ends at `end`. The lock is held, or nobody else is there yet."""
        opening = self._opening(end)
        self._number += 1
        self._offset = 0
        self._floor = record_size(sum(len(piece) for piece in opening.body))
        # Four times its snapshot at least: with many open groups the journal would else be mostly snapshots.
        self._limit = max(self.settings.segment_bytes, 4 * self._floor)
        pinned = frozenset(segment_of(at) for at in opening.pins)
        self._queue.append(_Roll(number=self._number, nbytes=self._limit, pinned=pinned, end=end))
        self.promised = self._add(opening.body).end

    def _mark(self) -> None:
        """Note how far all is durable, where no record follows to carry it. Not synced: lost, it is only missed."""
        with self._lock:
            if self._queue:
                return
            # It stays queued and is written again with the next batch: an unwritten one would be a gap.
            mark = self._add([])
        with contextlib.suppress(OSError):
            self.disk.write(segment_name(self._current), offset_of(mark.position), mark.pieces)

    def _write(self, items: Sequence[_Piece | _Roll]) -> None:
        run: list[Bytes] = []
        start = 0
        for item in items:
            if isinstance(item, _Roll):
                self._flush(start, run)
                run = []
                if item.number > self._current:
                    self._open(item)
            else:
                if not run:
                    start = item.position
                run.extend(item.pieces)
        self._flush(start, run)

    def _flush(self, position: int, pieces: list[Bytes]) -> None:
        if pieces:
            self.disk.write(segment_name(segment_of(position)), offset_of(position), pieces)

    def _open(self, roll: _Roll) -> None:
        """Close the current segment for good, then make the next: a new file, or one that nobody needs any more."""
        if self._current >= 0:
            self.disk.sync(segment_name(self._current))
        name = segment_name(roll.number)
        while self._free:
            spare = segment_name(self._free.pop(0))
            if self.disk.size(spare) >= roll.nbytes:
                self.disk.rename(spare, name)
                break
            self.disk.remove(spare)  # closed by an earlier server; what is shorter than it says passes for cut off
        else:
            self.disk.create(name, roll.nbytes)
        self.disk.sync_folder()
        if self._current >= 0:
            self._live.append(self._current)
        self._current = roll.number

    def _release(self, rolls: Sequence[_Roll]) -> None:
        """After a snapshot is durable: what lies before it and is not pinned is free."""
        if self.settings.retain == "all":
            # It is never written again: what was taken for it and not used goes back to the disk.
            for roll in rolls:
                if roll.end >= 0:
                    self.disk.truncate(segment_name(segment_of(roll.end)), offset_of(roll.end))
            return
        room = self.settings.window_bytes if self.settings.retain == "window" else 0
        kept: list[int] = []
        for number in reversed(self._live):
            room -= self.disk.size(segment_name(number)) if number < rolls[-1].number else 0
            if number >= rolls[-1].number or number in rolls[-1].pinned or room > 0:
                kept.append(number)
            else:
                self._free.append(number)
        self._live = kept[::-1]
        self._free.sort()
        while len(self._free) > SPARES:
            self.disk.remove(segment_name(self._free.pop()))


class Journal(SegmentLog):
    """See the module.

    Args:
        run: what each segment says of the run; see `events.Snapshotted`.
        state: the state that the appended events are applied to, each right after it was appended.
        previous_end: where the journal ended before this start; -1 for a new one.
        places: group id -> position of the record with its payload, for the groups that `state` holds already.
    """

    def __init__(
        self,
        disk: Disk,
        settings: JournalSettings,
        run: dict[str, Any],
        state: ReplayState,
        previous_end: int = -1,
        places: dict[int, int] | None = None,
    ) -> None:
        self.run, self.state, self.places = run, state, places or {}
        super().__init__(disk, settings, previous_end)

    def append(self, event: ev.Event) -> None:
        """Take in one event, before it is applied. Durable once `durable >= promised` as it is after this call.

        Raises:
            WireError, JournalError: it cannot be a record.
        """
        position = self._append(encode_event(event))
        if isinstance(event, ev.Inserted):
            self.places[event.header.group_id] = position

    def _opening(self, end: int) -> Opening:
        entries = self.state.ledger.entries
        self.places = {
            group: at for group, at in self.places.items() if group in entries and entries[group].payload is not None
        }
        flat = tuple(value for place in self.places.items() for value in place)
        body = encode_event(ev.Snapshotted(self.run, end, self.state.image(), flat))
        return Opening(body, self.places.values())
