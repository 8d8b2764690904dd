"""What the shards ask of the planner, and what others ask of it about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.replay import wire
from asyncrl.replay.columns import Frame
from asyncrl.replay.payloads import InShards, free_of
from asyncrl.replay.session import Answer, Reply, Session
from asyncrl.replay.shard_store import question_of

if TYPE_CHECKING:
    from asyncrl.replay.desk import Desk


class ShardsDesk:
    """See the module."""

    def __init__(self, desk: Desk, payloads: InShards) -> None:
        self._desk, self._payloads = desk, payloads
        self._paused: dict[int, str] = {}
        """Shards that can take in nothing, and why."""

    def addresses(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """Where every shard listens, once all are there."""

        def retry() -> Answer | None:
            found = self._payloads.addresses()
            return None if found is None else Answer(found)

        def give_up() -> Answer:
            raise self._payloads.missing()

        return self._desk.now_or_later(retry, give_up, body)

    def collect(self, session: Session, body: Any, frames: Sequence[Frame]) -> Reply:
        """A shard says where it listens and names keys that it holds; it is told which of them are free. Asked again
        and again, so nothing need be remembered on either side and a lost answer does no harm."""
        number, address, seal, paused, rows = wire.sequence(body, "collect", 5)
        asked = [question_of(row) for row in wire.sequence(rows, "questions")]
        why = wire.text(paused, "paused")
        shard = self._payloads.enlist(number, address, seal, session)
        self._paused[shard] = why
        self._desk.core.shards_paused = "; ".join(
            f"shard {which}: {why}" for which, why in sorted(self._paused.items()) if why
        )
        free = list(free_of(asked, self._desk.core.state.ledger.entries, shard))
        return Answer([self._payloads.run_id, free, self._desk.vocabulary(), self._desk.over])
