"""One shard behind the server's socket: it stores payloads, hands them out, and asks the planner what it may delete.

consumes:     puts of rollout workers, gets of learner ranks, answers of the planner
waits for:    nothing; while the planner is silent nothing is deleted, and after `wait_timeout_s` the shard exits
unblocked by: the planner's answer to a question that is repeated: which of these keys are free?
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

from asyncrl.errors import ReplayError, WireError
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import MAX_VOCABULARY, StoredGroup, check_stored, shard_of, split_frames
from asyncrl.replay.codec.lease import pack_places
from asyncrl.replay.codec.messages import decode_record
from asyncrl.replay.net.clock import awake_clock
from asyncrl.replay.server.sessions import Answer, Reply, Session
from asyncrl.replay.shards.payloads import Collected
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import Held, Key, ShardStore, key_for, key_of
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import GroupHeader

KEYS_ASKED = 16384
"""Limit on keys in one question to the planner."""
SPARE = 2
"""A shard grants credits for this many times `replay.max_bytes`, and accepts no more from one worker. It is more than
the planner's credits: otherwise a shard full of stored groups and groups in flight could keep out the very group that
the learner waits for."""
MOST = 2 * SPARE
"""A shard holds no more than this many times `replay.max_bytes`, so that a worker that ignores its credit leaves room
for others."""
MAX_TAGS = 2
"""Limit on payloads of one attempt that a shard accepts from one worker; an honest worker announces one."""


class PlannerLink:
    """The planner as a shard sees it."""

    def __init__(self, config: ReplayConfig, shard: int, run_digest: str, seals: Seals) -> None:
        name, address = f"shard {shard}", config.shard_address
        self._connection = Connection(config.address, role="shard", name=name, run_digest=run_digest, config=config)
        self._who = [shard, address, seals.address(shard, address)]

    def ask(self, held: Sequence[tuple[Key, Held]], paused: str) -> Future[Response]:
        """Ask which of these keys are free.

        Args:
            paused: why this shard cannot accept payloads; empty if it can.
        """
        rows = [[*key, item.maker] for key, item in held]
        return self._connection.request("collect", [*self._who, paused[: wire.MAX_TEXT], rows])

    def close(self) -> None:
        self._connection.close()


def heard(response: Response) -> Collected:
    """Decode the planner's answer. Raises WireError."""
    found = decode_record(Collected, response.body)
    wire.integer(found.vocabulary, "vocabulary", 0, MAX_VOCABULARY)
    for position in found.free:
        wire.integer(position, "position", 0, KEYS_ASKED)
    return found


@dataclass(slots=True)
class ShardProgress:
    """See `server.served.Progress`."""

    finished: bool = False
    applied: int = 0


class Shard:
    """What the server's loop serves in a shard: tracks workers, polls the planner, handles the verbs `put` and `get`.

    Args:
        number: number of this shard.
        first: the planner's first answer.
    """

    over = False

    def __init__(
        self, number: int, store: ShardStore, link: PlannerLink, seals: Seals, config: ReplayConfig, first: Collected
    ) -> None:
        self.number, self.store, self._seals, self._run_id = number, store, seals, first.run_id
        self.vocabulary, self.routers = first.vocabulary, first.announced_routers
        self._count, self._max_bytes = config.shards, config.max_bytes
        self.paused = ""
        self.state = ShardProgress()
        self.clock = awake_clock(config)
        self._link, self._every_s, self._silence_s = link, config.heartbeat_s / 2, config.heartbeat_timeout_s
        self._asked: tuple[list[tuple[Key, Held]], Future[Response]] | None = None
        self._ask_at = 0.0
        self._cursor = 0
        self._seen: dict[str, float] = {}
        """Incarnation of a worker -> when it was last heard."""

    def hello(self, worker: str, incarnation: str, served: int = -1) -> None:
        self._seen[incarnation] = self.clock()

    def hello_learner(self, rank: str, incarnation: str) -> None:
        """Nothing to record: every learner with the keys may read."""

    def heartbeat(self, worker: str, incarnation: str, stats: dict[str, float]) -> None:
        self._seen[incarnation] = self.clock()

    def goodbye(self, worker: str, incarnation: str) -> None:
        self._seen.pop(incarnation, None)

    def expel(self, worker: str, incarnation: str) -> None:
        self._seen.pop(incarnation, None)

    def expire(self) -> list[str]:
        """Forget silent workers. Also take the planner's answer if it has arrived, and ask the next question.

        Raises:
            AsyncRLError: the planner serves another run, has another shard of this number, or does not answer.
        """
        now = self.clock()
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen <= self._silence_s}
        if self._asked is not None and self._asked[1].done():
            asked, future = self._asked
            self._asked = None
            self._hear(asked, heard(future.result()))
        if self._asked is None and not self.state.finished and now >= self._ask_at:
            self._ask_at = now + self._every_s
            asked = self._next_part()
            self._asked = (asked, self._link.ask(asked, self.paused))
        return []

    def _hear(self, asked: list[tuple[Key, Held]], said: Collected) -> None:
        self.vocabulary, self.routers = said.vocabulary, said.announced_routers
        free = (asked[position] for position in said.free if position < len(asked))
        # A payload that was put again since the question may be needed after all: the planner is asked about it anew.
        self.state.applied += self.store.release(key for key, held in free if self.store.held.get(key) is held)
        if said.over:
            self.state.finished = True
            self._link.close()

    def _next_part(self) -> list[tuple[Key, Held]]:
        """Return the next `KEYS_ASKED` held payloads; after the last, start over."""
        held = self.store.held
        start = self._cursor if self._cursor < len(held) else 0
        self._cursor = start + KEYS_ASKED
        return list(islice(held.items(), start, self._cursor))

    def handle(self, session: Session, verb: str, body: Any, frames: Sequence[Frame]) -> Reply:
        """Run one request of a peer.

        Raises:
            WireError: the protocol forbids it. ReplayError: the payload is not here.
        """
        if verb == "put" and session.role == "worker":
            return self._put(session.name, body, frames)
        if verb == "get" and session.role == "learner":
            return self._get(body)
        raise WireError(f"a {session.role} has no verb {wire.short(verb)} at a shard")

    def window(self) -> int:
        """Bytes that each producer may have unacknowledged: an even share of the free memory. Never zero, as a worker
        without credit would send nothing; if there is no room, one group at a time is refused and sent again."""
        free = SPARE * self._max_bytes - self.store.nbytes
        return max(1, -(-free // max(1, len(self._seen))))

    def _put(self, worker: str, body: Any, frames: Sequence[Frame]) -> Answer:
        header = headers.decode_group_header(body, worker)
        if shard_of(header.group_id, self._count) != self.number:
            raise WireError(f"group {header.group_id} does not belong to shard {self.number}")
        stored = split_frames(header, frames)
        check_stored(header, stored, self.vocabulary, self.routers)
        key = key_for(header, stored)
        if key not in self.store.held and not self._has_room(header):
            return Answer([self.number, "", "", self.window()])
        self.store.put(header, stored, key)
        self.state.applied += 1
        seal = self._seals.receipt(self._run_id, self.number, header, key.tag)
        return Answer([self.number, key.tag, seal, self.window()])

    def _has_room(self, header: GroupHeader) -> bool:
        """Whether there is room for a group now. Raises WireError if it could never be accepted."""
        store, most_of_one = self.store, SPARE * self._max_bytes
        if header.nbytes > most_of_one:
            raise WireError(
                f"group {header.group_id} has {header.nbytes} bytes, but a shard accepts at most {SPARE} * "
                f"replay.max_bytes={most_of_one} from one worker. Raise replay.max_bytes"
            )
        if store.tags_by[header.group_id, header.attempt, header.worker] >= MAX_TAGS:
            raise WireError(
                f"worker {header.worker!r} has already sent {MAX_TAGS} payloads of group {header.group_id} (attempt "
                f"{header.attempt}); a group is generated once"
            )
        left = min(most_of_one - store.bytes_by[header.worker], MOST * self._max_bytes - store.nbytes)
        return header.nbytes <= left

    def _get(self, body: Any) -> Answer:
        stored: dict[int, list[StoredGroup]] = {}
        places: list[tuple[int, int]] = []
        sampled: list[int] = []
        for row in wire.sequence(body, "get"):
            group, *key, positions, with_texts = wire.sequence(row, "get row", 6)
            wire.integer(group, "group", 0, wire.MAX_FRAMES)
            found = self._find(key_of(key))
            stored[group], last = [found], len(found.columns.rows) - 1
            for position in wire.sequence(positions, "positions"):
                places.append((group, wire.integer(position, "position", 0, last)))
            if with_texts is True:
                sampled.append(group)
        return Answer(*pack_places(stored, places, sampled))

    def _find(self, key: Key) -> StoredGroup:
        found = self.store.find(key)
        if found is None:
            raise ReplayError(
                f"shard {self.number} does not have the payload of group {key.group_id} (attempt "
                f"{key.attempt}), so its journal was lost. Move the folder journal in run.dir away on every machine, "
                "then resume=auto generates the groups after the checkpoint again"
            )
        return found
