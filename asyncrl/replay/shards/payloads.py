"""`Payloads` in shards, and the planner's handlers for shards: it records which shard has which payload, and verifies
what shards report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import FencedError, LedgerError, NoProgress, WireError
from asyncrl.recorded import ROUTERS, announced_routers, row_of_routers
from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import Elsewhere, shard_of
from asyncrl.replay.codec.messages import Count, Name, encode_record
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.payloads import Places
from asyncrl.replay.server.sessions import Answer, Reply, Session, now_or_later
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import Key, question_of
from asyncrl.types import GroupHeader, Routers


class InShards:
    """Payloads are checked and stored by shards. An insert carries the sealed receipt of a shard, and a lease tells a
    rank where to fetch.

    Args:
        count: number of shards.
        silence_s: seconds of silence after which a shard counts as dead, and another process may take its number.
        clock: the clock of `Session.seen`.
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
        self._peers: dict[int, Session] = {}
        self._paused: dict[int, str] = {}
        """Shard -> why it cannot accept payloads; empty if it can."""

    def take(
        self, header: GroupHeader, body: Any, frames: Sequence[Frame], vocabulary: int, routers: Routers | None
    ) -> Elsewhere:
        if body is None or frames:
            raise WireError(
                f"group {header.group_id} arrived without the receipt of a shard, but replay.shards={self.count}"
            )
        shard, tag, seal = wire.sequence(body, "receipt", 3)
        wire.integer(shard, "shard", 0, self.count - 1)
        wire.text(tag, "tag", wire.MAX_NAME)
        wire.text(seal, "seal", wire.MAX_NAME)
        expected = self._seals.receipt(self.run_id, shard, header, tag)
        if shard != shard_of(header.group_id, self.count) or not Seals.same(seal, expected):
            raise WireError(f"the receipt of group {header.group_id} was not made by shard {shard} for this header")
        return Elsewhere(shard, tag)

    def hand_out(
        self, stored: Mapping[int, Sequence[Any]], places: Places, sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        positions: dict[int, list[int]] = {group: [] for group in sorted({g for g, _ in places}.union(sampled))}
        for group, position in sorted(places):
            positions[group].append(position)
        rows = [[group, *_where(*stored[group]), at, group in sampled] for group, at in positions.items()]
        return [[], [], [], rows], []

    def enlist(self, shard: Any, address: Any, seal: Any, peer: Session) -> int:
        """Record where a shard listens. Returns its number.

        Raises:
            WireError: it is not a shard of this run. FencedError: another shard of this number is alive at another
                address.
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
                    f"shard {shard} listens on {self._addresses[shard]} and was heard {silent_s:.1f} s ago, but "
                    f"{address} has the same number. Stop one of them, or give it another number below "
                    f"replay.shards={self.count}"
                )
        self._addresses[shard], self._peers[shard] = address, peer
        return shard

    def addresses(self) -> list[str] | None:
        """The addresses of all shards in order; None while one is missing."""
        known = [self._addresses.get(shard) for shard in range(self.count)]
        found = [address for address in known if address is not None]
        return found if len(found) == self.count else None

    def tell_addresses(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Handler of `shards`: where each shard listens, once all are known."""

        def retry() -> Answer | None:
            found = self.addresses()
            return None if found is None else Answer(found)

        def give_up() -> Answer:
            names = ", ".join(str(shard) for shard in range(self.count) if shard not in self._addresses)
            raise NoProgress(f"shard {names} of {self.count} has not connected to the replay server. Start it")

        return now_or_later(retry, give_up, body, "addresses", lambda: self.addresses() is not None)

    def collect(self, handlers: Handlers, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Handler of `collect`: take the address of a shard and keys that it holds; return which of them are free. A
        shard asks again and again, so neither side has to remember anything and a lost answer does no harm."""
        number, address, seal, paused, rows = wire.sequence(body, "collect", 5)
        asked = [question_of(row) for row in wire.sequence(rows, "questions")]
        why = wire.text(paused, "paused")
        shard = self.enlist(number, address, seal, session)
        self._paused[shard] = why
        core = handlers.core
        core.run.shards_paused = "; ".join(f"shard {at}: {why}" for at, why in sorted(self._paused.items()) if why)
        free = list(free_of(asked, core.state.ledger.entries, shard))
        vocabulary, routers = handlers.limits()
        return Answer(encode_record(Collected(self.run_id, free, vocabulary, row_of_routers(routers), handlers.over)))


def _where(payload: Any) -> tuple[int, str]:
    if not isinstance(payload, Elsewhere):
        raise LedgerError("a group of a run with shards was stored by the planner")
    return payload.shard, payload.tag


def free_of(asked: Sequence[tuple[Key, str]], entries: Mapping[int, Entry], shard: int) -> Iterable[int]:
    """Yield the positions in `asked` (keys with the workers that put them) of payloads that `shard` need not keep. It
    must keep what the worker that holds the attempt may still announce, and what the core keeps. Everything else was
    dropped, committed, refused, reassigned as another attempt, or put by a worker without that assignment."""
    for position, (key, maker) in enumerate(asked):
        entry = entries.get(key.group_id)
        if entry is None or entry.attempt != key.attempt:
            yield position
        elif entry.state is GroupState.IN_FLIGHT:
            if not entry.worker or maker not in ("", entry.worker):
                yield position
        elif entry.payload != Elsewhere(shard, key.tag):
            yield position


def with_shards(core: ReplayCore, payloads: InShards) -> Handlers:
    """Return handlers that have the verbs `shards` and `collect`, too."""
    handlers = Handlers(core, payloads)
    handlers.shared_verbs["shards"] = payloads.tell_addresses
    handlers.shard_verbs["collect"] = functools.partial(payloads.collect, handlers)
    return handlers


@dataclass(frozen=True, slots=True)
class Collected:
    """The answer to `collect`."""

    run_id: Name
    free: list[int]
    """Positions among the keys asked about."""
    vocabulary: Count
    routers: list[int]
    """`row_of_routers` of those that the learner announced."""
    over: bool
    """The run is over: the shard may exit."""

    @property
    def announced_routers(self) -> Routers | None:
        return announced_routers({ROUTERS: self.routers})
