"""The planner's handlers for requests of shards, and for requests of other peers about shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.recorded import row_of_routers
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Reply, Session, now_or_later
from asyncrl.replay.shards.payloads import InShards, free_of
from asyncrl.replay.shards.store import question_of


def with_shards(handlers: Handlers, payloads: InShards) -> Handlers:
    """Add the verbs `shards` and `collect` to `handlers`, and return it."""
    shards = ShardHandlers(handlers, payloads)
    handlers.shared_verbs["shards"] = shards.addresses
    handlers.shard_verbs["collect"] = shards.collect
    return handlers


class ShardHandlers:
    """Handlers of the verbs `shards` and `collect`."""

    def __init__(self, handlers: Handlers, payloads: InShards) -> None:
        self._handlers, self._payloads = handlers, payloads
        self._paused: dict[int, str] = {}
        """Shard -> why it cannot accept payloads; empty if it can."""

    def addresses(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Return where each shard listens, once all shards are known."""

        def retry() -> Answer | None:
            found = self._payloads.addresses()
            return None if found is None else Answer(found)

        def give_up() -> Answer:
            raise self._payloads.missing()

        def are_known() -> bool:
            return self._payloads.addresses() is not None

        return now_or_later(retry, give_up, body, "addresses", are_known)

    def collect(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Take the address of a shard and keys that it holds; return which of them are free. A shard asks again and
        again, so neither side has to remember anything and a lost answer does no harm."""
        number, address, seal, paused, rows = wire.sequence(body, "collect", 5)
        asked = [question_of(row) for row in wire.sequence(rows, "questions")]
        why = wire.text(paused, "paused")
        shard = self._payloads.enlist(number, address, seal, session)
        self._paused[shard] = why
        self._handlers.core.run.shards_paused = "; ".join(
            f"shard {which}: {why}" for which, why in sorted(self._paused.items()) if why
        )
        free = list(free_of(asked, self._handlers.core.state.ledger.entries, shard))
        vocabulary, routers = self._handlers.limits()
        return Answer([self._payloads.run_id, free, vocabulary, row_of_routers(routers), self._handlers.over])
