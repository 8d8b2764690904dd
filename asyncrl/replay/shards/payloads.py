"""Payloads that are in shards: the planner keeps who has what, and which shards may be believed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from asyncrl.errors import FencedError, LedgerError, NoProgress, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import Elsewhere, shard_of
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.server.payloads import Places
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import Key
from asyncrl.types import GroupHeader, Routers


class Peer(Protocol):
    """One life of a process that is connected."""

    incarnation: str
    seen: float
    """When it was last heard."""


class InShards:
    """Checked and stored by a shard, whose sealed receipt comes with the insert. A rank is told where to ask.

    Args:
        count: of shards.
        silence_s: after so long a shard that is not heard is taken for dead, and another may have its number.
        clock: that of `Peer.seen`.
    """

    def __init__(
        self,
        count: int,
        run_id: str,
        seals: Seals,
        silence_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count, self.run_id = count, run_id
        self._seals, self._silence_s, self._clock = seals, silence_s, clock
        self._addresses: dict[int, str] = {}
        self._peers: dict[int, Peer] = {}

    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> Elsewhere:
        if body is None or frames:
            raise WireError(f"group {header.group_id} came without the receipt of a shard: replay.shards={self.count}")
        shard, tag, seal = wire.sequence(body, "receipt", 3)
        wire.integer(shard, "shard", 0, self.count - 1)
        wire.text(tag, "tag", wire.MAX_NAME)
        wire.text(seal, "seal", wire.MAX_NAME)
        expected = self._seals.receipt(self.run_id, shard, header, tag)
        if shard != shard_of(header.group_id, self.count) or not Seals.same(seal, expected):
            raise WireError(f"the receipt of group {header.group_id} was not made by shard {shard} for this header")
        return Elsewhere(shard, tag)

    def hand_out(
        self, stored: Mapping[int, Any], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        positions: dict[int, list[int]] = {group: [] for group in sorted({g for g, _ in places}.union(sampled))}
        for group, position in sorted(places):
            positions[group].append(position)
        rows = [[group, *_where(stored[group]), at, group in sampled] for group, at in positions.items()]
        return [[], [], [], rows], []

    def enlist(self, shard: Any, address: Any, seal: Any, peer: Peer) -> int:
        """A shard says where it listens. Returns its number.

        Raises:
            WireError: it is none of this run's. FencedError: another one of this number is alive, elsewhere.
        """
        wire.integer(shard, "shard", 0, self.count - 1)
        wire.text(address, "address", wire.MAX_NAME)
        if not Seals.same(wire.text(seal, "seal", wire.MAX_NAME), self._seals.address(shard, address)):
            raise WireError(f"shard {shard} at {address} has other keys than this server")
        known = self._peers.get(shard)
        if known is not None and known.incarnation != peer.incarnation and self._addresses[shard] != address:
            silent_s = self._clock() - known.seen
            if silent_s <= self._silence_s:
                raise FencedError(
                    f"shard {shard} listens on {self._addresses[shard]} and was heard {silent_s:.1f} s ago; {address} "
                    "is a second one of this number. Stop one of them, or give it another number below "
                    f"replay.shards={self.count}"
                )
        self._addresses[shard], self._peers[shard] = address, peer
        return shard

    def addresses(self) -> list[str] | None:
        """Of every shard in order; None while one is missing."""
        known = [self._addresses.get(shard) for shard in range(self.count)]
        found = [address for address in known if address is not None]
        return found if len(found) == self.count else None

    def missing(self) -> NoProgress:
        """Whom those wait for who ask for the addresses."""
        names = ", ".join(str(shard) for shard in range(self.count) if shard not in self._addresses)
        return NoProgress(f"shard {names} of {self.count} has not come to the replay server; start it")


def _where(payload: Any) -> tuple[int, str]:
    if not isinstance(payload, Elsewhere):
        raise LedgerError("a group of a run with shards was stored by the planner")
    return payload.shard, payload.tag


def free_of(asked: Sequence[tuple[Key, str]], entries: Mapping[int, Entry], shard: int) -> Iterable[int]:
    """Positions in `asked`, keys with their makers, of what `shard` need not keep. What the worker that holds an
    attempt may still announce is kept, as is what the core keeps; everything else was dropped, committed, refused,
    given to another attempt or put by a worker without that order."""
    for position, (key, maker) in enumerate(asked):
        entry = entries.get(key.group_id)
        if entry is None or entry.attempt != key.attempt:
            yield position
        elif entry.state is GroupState.IN_FLIGHT:
            if not entry.worker or maker not in ("", entry.worker):
                yield position
        elif entry.payload != Elsewhere(shard, key.tag):
            yield position
