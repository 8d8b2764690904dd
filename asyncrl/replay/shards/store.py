"""The payload store of one shard: payloads by key, each journaled before it is acknowledged, kept until released.

    put(header, payload) -> key     appends the payload; durable like any record (`promised`, `durable`)
    find(key)                       returns the payload, from memory
    release(keys)                   forgets payloads; the segments they lay in are reused

A key identifies the attempt and the bytes: (group id, attempt, tag). The same group sent twice has the same key, and no
peer can replace another's group without having its exact bytes. The store decides nothing: the planner says what is
released, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from asyncrl.errors import JournalError
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.group import Elsewhere, StoredGroup
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.disk import Disk, FolderDisk
from asyncrl.replay.journal.log import JournalSettings, Opening, SegmentLog
from asyncrl.replay.journal.records import encode_event
from asyncrl.replay.journal.recovery import Begun, decode_record, read_event, records_of, segment_chain
from asyncrl.replay.journal.segments import damaged, scan, segment_name
from asyncrl.types import GroupHeader

SHARD = "shard-"
"""Prefix of a shard's folder name in the journal folder."""


class Key(NamedTuple):
    """Identifies a payload."""

    group_id: int
    attempt: int
    tag: str
    """Hash of header and payload."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Journal record: a payload was put."""

    tag: str
    header: GroupHeader
    payload: Any

    @property
    def key(self) -> Key:
        return Key(self.header.group_id, self.header.attempt, self.tag)


@dataclass(frozen=True, slots=True)
class Released:
    """Journal record: these payloads are no longer needed."""

    keys: list[Any]
    """Rows `[group id, attempt, tag]`."""


KINDS: Mapping[str, type] = {kind.__name__: kind for kind in (Stored, Released, ev.Snapshotted)}


@dataclass(frozen=True, slots=True)
class Held:
    """A payload in memory."""

    position: int
    """Position of its record in the journal."""
    nbytes: int
    maker: str
    """Name of the worker that put it; empty if an older journal does not record it."""
    payload: StoredGroup


def shard_folder(journal: Path, shard: int) -> Path:
    """Path of a shard's journal in the journal folder of the run."""
    return journal / f"{SHARD}{shard}"


def key_for(header: GroupHeader, stored: StoredGroup) -> Key:
    """Return the key of a group; its tag is a 128-bit hash over the header and every payload byte, in hex."""
    # Frames are hashed without their layout, which follows from the header.
    digest = xxhash.xxh3_128(wire.pack([headers.packed_header(header), len(stored.texts)]))
    for frame in stored.frames:
        digest.update(frame)
    return Key(header.group_id, header.attempt, digest.hexdigest())


def key_of(row: Any) -> Key:
    """Decode a key. Raises WireError unless `row` is `[group id, attempt, tag]`."""
    group_id, attempt, tag = wire.sequence(row, "key", 3)
    return Key(
        wire.integer(group_id, "group_id", 0, wire.MAX_ID),
        wire.integer(attempt, "attempt", 0, wire.MAX_VERSION),
        wire.text(tag, "tag", wire.MAX_NAME),
    )


def question_of(row: Any) -> tuple[Key, str]:
    """Decode a key and the worker that put it. Raises WireError unless `row` is `[group id, attempt, tag, maker]`."""
    *key, maker = wire.sequence(row, "question", 4)
    return key_of(key), wire.text(maker, "maker", wire.MAX_NAME)


class ShardStore(SegmentLog):
    """Payloads in memory and in a journal, see the module docstring.

    Args:
        run: identifies the shard: `run_id` and `shard`, its number.
        held: payloads that the journal holds already.
    """

    def __init__(
        self,
        disk: Disk,
        settings: JournalSettings,
        run: dict[str, Any],
        previous_end: int = -1,
        held: dict[Key, Held] | None = None,
    ) -> None:
        self.run = run
        self.held: dict[Key, Held] = {}
        self.nbytes = 0
        self.bytes_by: Counter[str] = Counter()
        """Bytes held, by maker."""
        self.tags_by: Counter[tuple[int, int, str]] = Counter()
        """Number of payloads held, by (group id, attempt, maker)."""
        for key, item in (held or {}).items():
            self._keep(key, item)
        super().__init__(disk, settings, previous_end)

    def put(self, header: GroupHeader, payload: StoredGroup, key: Key | None = None) -> Key:
        """Store a group of `header.worker`. A payload that is held already is not written again, unless another worker
        sends it: then it is counted for that worker. Durable once `durable` reaches the value that `promised` has after
        this call.

        Args:
            key: `key_for(header, payload)`, if the caller has computed it.
        """
        key = key or key_for(header, payload)
        known = self.held.get(key)
        if known is not None and known.maker == header.worker:
            # A new object, so that an answer to a question asked about this key before the put is ignored.
            self.held[key] = replace(known)
            return key
        position = self._append(encode_event(Stored(key.tag, header, payload)))
        if known is not None:
            self._forget(key)
        self._keep(key, Held(position, header.nbytes, header.worker, payload))
        return key

    def find(self, key: Key) -> StoredGroup | None:
        held = self.held.get(key)
        return None if held is None else held.payload

    def release(self, keys: Iterable[Key]) -> int:
        """Forget these payloads; return how many were held. Unknown keys have been forgotten already."""
        known = [key for key in dict.fromkeys(keys) if key in self.held]
        if known:
            self._append(encode_event(Released([list(key) for key in known])))
        for key in known:
            self._forget(key)
        return len(known)

    def _keep(self, key: Key, held: Held) -> None:
        self.held[key] = held
        self.nbytes += held.nbytes
        self.bytes_by[held.maker] += held.nbytes
        self.tags_by[key.group_id, key.attempt, held.maker] += 1

    def _forget(self, key: Key) -> None:
        held = self.held.pop(key)
        of_one = (key.group_id, key.attempt, held.maker)
        self.nbytes -= held.nbytes
        self.bytes_by[held.maker] -= held.nbytes
        self.tags_by[of_one] -= 1
        if not self.tags_by[of_one]:
            del self.tags_by[of_one]
        if not self.bytes_by[held.maker]:
            del self.bytes_by[held.maker]

    def _opening(self, end: int) -> Opening:
        places = tuple(held.position for held in self.held.values())
        keys = [[*key, held.nbytes] for key, held in self.held.items()]
        return Opening(encode_event(ev.Snapshotted(self.run, end, {"keys": keys}, places)), places)


def open_store(disk: Disk, settings: JournalSettings, run: dict[str, Any]) -> ShardStore:
    """Open the store, recovered from the journal on `disk`; empty if there is none.

    Raises:
        JournalError: the journal is damaged, of another version, or of another shard or run.
    """
    chain = segment_chain(disk)
    if not chain:
        return ShardStore(disk, settings, run)
    newest = chain[-1]
    if newest.snapshot.run != run:
        raise JournalError(
            f"this folder contains the journal of {newest.snapshot.run}, not of {run}. Give this shard the folder "
            "that it had before. For a new run, give another run.dir or overwrite=true"
        )
    held, end = _recover(disk, newest)
    # What was read may not be durable: a killed process leaves its writes in the page cache.
    disk.sync(segment_name(newest.number))
    return ShardStore(disk, settings, run, end, held)


def check_store(disk: Disk) -> None:
    """Read everything that opening the store would read. Raises JournalError if it is damaged."""
    if chain := segment_chain(disk):
        _recover(disk, chain[-1])


def _recover(disk: Disk, newest: Begun) -> tuple[dict[Key, Held], int]:
    """Return `(held payloads, end of the journal)`, from the newest segment and the older payloads it points to."""
    older: dict[Key, int] = {}
    held: dict[Key, Held] = {}
    end = -1
    for record in scan(disk, newest.number):
        end = record.end
        event = decode_record(record, KINDS)
        if isinstance(event, ev.Snapshotted):
            keys = [Key(*row[:3]) for row in event.image["keys"]]
            older = dict(zip(keys, event.places, strict=True))
        elif isinstance(event, Stored):
            held[event.key] = Held(record.position, event.header.nbytes, event.header.worker, event.payload)
        elif isinstance(event, Released):
            for key in map(key_of, event.keys):
                older.pop(key, None)
                held.pop(key, None)
    attached = {key: _attach(disk, key, position) for key, position in older.items()}
    return attached | held, end


def _attach(disk: Disk, key: Key, position: int) -> Held:
    stored = read_stored(disk, position)
    if stored is None or stored.key != key:
        raise damaged(position, f"the payload of group {key.group_id} is missing")
    return Held(position, stored.header.nbytes, stored.header.worker, stored.payload)


def read_stored(disk: Disk, position: int) -> Stored | None:
    """Return the payload record at a journal position, or None if there is none."""
    event = read_event(disk, position, KINDS)
    return event if isinstance(event, Stored) else None


def read_positions(disk: Disk) -> dict[Key, int]:
    """Return the position of every payload that is still in the journal, including released ones.

    Raises:
        JournalError: there is no journal of a shard, or it is damaged.
    """
    chain = segment_chain(disk)
    if not chain:
        raise JournalError("the journal of this shard holds no finished record")
    events = ((record.position, decode_record(record, KINDS)) for _, record in records_of(disk, chain))
    return {event.key: position for position, event in events if isinstance(event, Stored)}


class ShardArchive:
    """Payloads of a run, wherever they are stored. Each shard's journal is scanned once, when the first of its payloads
    is needed."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._shelves: dict[int, tuple[FolderDisk, dict[Key, int]]] = {}
        """The journal of each shard, and where each payload lies in it."""

    def payload(self, inserted: ev.Inserted) -> StoredGroup:
        """Return the payload of a group in the journal of the run.

        Raises:
            JournalError: the shard's journal is missing, damaged, or was not retained.
        """
        where = inserted.payload
        if not isinstance(where, Elsewhere):
            return where
        key = Key(inserted.header.group_id, inserted.header.attempt, where.tag)
        disk, positions = self._shelf(where.shard)
        stored = read_stored(disk, positions[key]) if key in positions else None
        if stored is None:
            raise JournalError(f"the journal of shard {where.shard} no longer has group {key.group_id}")
        return stored.payload

    def close(self) -> None:
        for disk, _ in self._shelves.values():
            disk.close()

    def _shelf(self, shard: int) -> tuple[FolderDisk, dict[Key, int]]:
        if shard not in self._shelves:
            folder = shard_folder(self._journal, shard)
            if not folder.is_dir():
                raise JournalError(
                    f"{folder} is missing. The payloads of this run are in the journals of its shards. Copy each "
                    "journal to its place from the machine where its shard ran"
                )
            disk = FolderDisk(folder, locked=False)
            self._shelves[shard] = disk, read_positions(disk)
        return self._shelves[shard]
