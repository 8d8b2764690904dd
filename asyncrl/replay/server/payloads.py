"""Where the payloads of a run are, so that the handlers need not know: with the planner (here), or in shards.

The core sees headers and something opaque. What that is, how it is checked at the door and how a rank comes by its
trajectories is decided by an implementation of `Payloads`.
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
    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> Any:
        """What the core keeps of an insert. Raises WireError for one that cannot be trained on."""
        ...

    def hand_out(
        self, stored: Mapping[int, Any], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        """`([table, extras, text rows, rows of what is elsewhere], frames)` of a lease, from what the core kept: the
        trajectories at `places`, and of the `sampled` groups all, with texts and without extras."""
        ...


class WithPlanner:
    """Checked, stored and handed out by this process."""

    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> StoredGroup:
        if body is not None:
            raise WireError(f"group {header.group_id} came with a receipt of a shard: this run has none")
        stored = split_frames(header, frames)
        check_stored(header, stored, vocabulary, routers)
        return stored

    def hand_out(
        self, stored: Mapping[int, Any], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        parcel, frames = pack_places(stored, places, sampled)
        return [*parcel, []], frames


def refuse_other_store(payloads: Iterable[Any], shards: int) -> None:
    """Raises JournalError when a recovered journal has its payloads where this server would not look."""
    for payload in payloads:
        missing = isinstance(payload, Elsewhere) and payload.shard >= shards
        if missing or (shards > 0 and isinstance(payload, StoredGroup | InJournal)):
            where = f"in shard {payload.shard}" if isinstance(payload, Elsewhere) else "with the replay server"
            raise JournalError(
                f"replay.shards={shards}, but this journal has a payload {where}. Resume the run with the number of "
                "shards that it had"
            )
