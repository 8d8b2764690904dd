"""The way to the shards of a run, for a worker that stores groups and a rank that fetches them.

waits for:    the replay server, which knows where each shard listens; then the shard that was asked
unblocked by: their answers; after `wait_timeout_s` the error names who was silent
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from asyncrl.replay import wire
from asyncrl.replay.connection import Connection, Response
from asyncrl.replay.payload import EncodedGroup
from asyncrl.replay.shard_store import shard_of
from asyncrl.schema import ReplayConfig


class ShardLinks:
    """Connections are made when they are first needed. Safe to use from several threads."""

    def __init__(self, planner: Connection, run_digest: str, config: ReplayConfig) -> None:
        self._planner, self._digest, self._config = planner, run_digest, config
        self._lock = threading.Lock()
        self._asked: Future[Response] | None = None
        self._links: dict[int, Connection] = {}

    async def put(self, encoded: EncodedGroup) -> list[Any]:
        """Store a group at its shard; returns the receipt that the planner wants with the header, once the payload is
        durable.

        Raises:
            WireError: the shard refused it. NoProgress: the shard, or who knows its address, did not answer.
        """
        where = await asyncio.wrap_future(self._addresses())
        link = self._link(shard_of(encoded.header.group_id, self._config.shards), where)
        body = [wire.encode_group_header(encoded.header), encoded.layout]
        response = await asyncio.wrap_future(link.request("put", body, encoded.frames, encoded.header.nbytes))
        *receipt, _ = wire.sequence(response.body, "put reply", 4)
        return receipt

    def get(self, rows: Sequence[Any]) -> list[Response]:
        """What a lease says is elsewhere: each shard is asked for its part, all at once.

        Args:
            rows: `[group, shard, tag, positions, with texts, group id, attempt]`.

        Raises:
            ReplayError: a shard has lost it. NoProgress: one did not answer.
        """
        questions: dict[int, list[Any]] = {}
        for group, shard, tag, positions, with_texts, group_id, attempt in rows:
            wire.integer(shard, "shard", 0, self._config.shards - 1)
            questions.setdefault(shard, []).append([group, group_id, attempt, tag, positions, with_texts])
        where = self._addresses().result()
        asked = [self._link(shard, where).request("get", body) for shard, body in questions.items()]
        return [question.result() for question in asked]

    def close(self) -> None:
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    def _addresses(self) -> Future[Response]:
        with self._lock:
            failed = self._asked is not None and self._asked.done() and self._asked.exception() is not None
            if self._asked is None or failed:
                self._asked = self._planner.request("shards", float(self._config.wait_timeout_s))
            return self._asked

    def _link(self, shard: int, where: Response) -> Connection:
        addresses = wire.sequence(where.body, "shard addresses", self._config.shards)
        with self._lock:
            if shard not in self._links:
                self._links[shard] = Connection(
                    wire.text(addresses[shard], "address", wire.MAX_NAME),
                    role=self._planner.role,
                    name=self._planner.name,
                    run_digest=self._digest,
                    config=self._config,
                    server=f"shard {shard} of the replay",
                )
            return self._links[shard]
