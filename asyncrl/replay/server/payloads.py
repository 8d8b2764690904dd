"""Storage of a run's payloads behind one interface, so that handlers need not know where they are: with the planner
(here), or in shards.

The core sees headers and an opaque object. An implementation of `Payloads` decides what that object is, how it is
checked on arrival and how a rank gets its trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from asyncrl.errors import JournalError, WireError
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import Elsewhere, StoredGroup, check_stored, split_frames
from asyncrl.replay.codec.lease import pack_places
from asyncrl.replay.core.durable.buffer import InJournal
from asyncrl.types import GroupHeader, Routers

Places = set[tuple[int, int]]
"""(group, trajectory) positions in a plan."""


class Payloads(Protocol):
    """Accepts the payload of an insert and hands out those of a lease."""

    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> Any:
        """Return what the core keeps of an insert. Raises WireError if it cannot be trained on."""
        ...

    def hand_out(
        self, stored: Mapping[int, Sequence[Any]], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        """Assemble a lease from what the core kept.

        Args:
            stored: position of a group in the plan -> what `take` returned for it, or for each of its members.
            places: trajectories to hand out.
            sampled: groups of which all trajectories are handed out, with texts and without extras.

        Returns:
            `([table, extras, text rows, rows of what is elsewhere], frames)`.
        """
        ...


class WithPlanner:
    """Payloads are checked, stored and handed out by this process."""

    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> StoredGroup:
        if body is not None:
            raise WireError(f"group {header.group_id} arrived with a receipt of a shard, but this run has no shards")
        stored = split_frames(header, frames)
        check_stored(header, stored, vocabulary, routers)
        return stored

    def hand_out(
        self, stored: Mapping[int, Sequence[Any]], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        parcel, frames = pack_places(stored, places, sampled)
        return [*parcel, []], frames


def refuse_other_store(payloads: Iterable[Any], shards: int) -> None:
    """Raise JournalError if a recovered journal has payloads where this server would not look for them."""
    for payload in payloads:
        missing = isinstance(payload, Elsewhere) and payload.shard >= shards
        if missing or (shards > 0 and isinstance(payload, StoredGroup | InJournal)):
            where = f"in shard {payload.shard}" if isinstance(payload, Elsewhere) else "with the replay server"
            raise JournalError(
                f"replay.shards={shards}, but the journal has a payload {where}. Resume the run with the number of "
                "shards that it began with"
            )
