"""What the shards ask of the planner, and what others ask of it about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.routing import row_of_routers
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Reply, Session, now_or_later
from asyncrl.replay.shards.payloads import InShards, free_of
from asyncrl.replay.shards.store import question_of


def with_shards(handlers: Handlers, payloads: InShards) -> Handlers:
    """`handlers`, which now know the verbs of shards and about shards."""
    shards = ShardHandlers(handlers, payloads)
    handlers.shared_verbs["shards"] = shards.addresses
    handlers.shard_verbs["collect"] = shards.collect
    return handlers


class ShardHandlers:
    """See the module."""

    def __init__(self, handlers: Handlers, payloads: InShards) -> None:
        self._handlers, self._payloads = handlers, payloads
        self._paused: dict[int, str] = {}
        """Shards that can take in nothing, and why."""

    def addresses(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Where every shard listens, once all are there."""

        def retry() -> Answer | None:
            found = self._payloads.addresses()
            return None if found is None else Answer(found)

        def give_up() -> Answer:
            raise self._payloads.missing()

        def are_known() -> bool:
            return self._payloads.addresses() is not None

        return now_or_later(retry, give_up, body, "addresses", are_known)

    def collect(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """A shard says where it listens and names keys that it holds; it is told which of them are free. Asked again
        and again, so nothing need be remembered on either side and a lost answer does no harm."""
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
