"""Read the retained payloads of a run with shards from the journals of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import JournalError
from asyncrl.replay.codec.group import Elsewhere, StoredGroup
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.shards.store import Key, read_positions, read_stored, shard_folder


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The journal of one shard, and where each payload lies in it."""

    disk: FolderDisk
    positions: dict[Key, int]


class ShardArchive:
    """Payloads of a run, wherever they are stored. Each shard's journal is scanned once, when the first of its payloads
    is needed."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._shelves: dict[int, _Shelf] = {}

    def payload(self, inserted: ev.Inserted) -> StoredGroup:
        """Return the payload of a group in the journal of the run.

        Raises:
            JournalError: the shard's journal is missing, damaged, or was not retained.
        """
        where = inserted.payload
        if not isinstance(where, Elsewhere):
            return where
        key = Key(inserted.header.group_id, inserted.header.attempt, where.tag)
        shelf = self._shelf(where.shard)
        stored = read_stored(shelf.disk, shelf.positions[key]) if key in shelf.positions else None
        if stored is None:
            raise JournalError(f"the journal of shard {where.shard} no longer has group {key.group_id}")
        return stored.payload

    def close(self) -> None:
        for shelf in self._shelves.values():
            shelf.disk.close()

    def _shelf(self, shard: int) -> _Shelf:
        if shard not in self._shelves:
            folder = shard_folder(self._journal, shard)
            if not folder.is_dir():
                raise JournalError(
                    f"{folder} is missing. The payloads of this run are in the journals of its shards. Copy each "
                    "journal to its place from the machine where its shard ran"
                )
            disk = FolderDisk(folder, locked=False)
            self._shelves[shard] = _Shelf(disk, read_positions(disk))
        return self._shelves[shard]
