"""Connections to the shards of a run, for workers that store groups and ranks that fetch them.

waits for:    the replay server, which knows the address of each shard; then the shard that was asked
unblocked by: their answers; after `wait_timeout_s` an error that names the silent process
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from asyncrl.errors import NoProgress
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.group import EncodedGroup, shard_of
from asyncrl.settings.replay import ReplayConfig


class ShardLinks:
    """Opens connections when they are first needed. Thread-safe."""

    def __init__(self, planner: Connection, run_digest: str, config: ReplayConfig) -> None:
        self._planner, self._digest, self._config = planner, run_digest, config
        self._lock = threading.Lock()
        self._asked: Future[Response] | None = None
        self._links: dict[int, Connection] = {}
        self._left: list[Connection] = []
        """Connections to earlier addresses of shards; requests in progress there end by themselves."""

    async def link_for(self, encoded: EncodedGroup) -> Connection:
        """Return the connection to the group's shard. Raises NoProgress: the server, which knows its address, did not
        answer."""
        where = await asyncio.wrap_future(self._addresses())
        return self._link(shard_of(encoded.header.group_id, self._config.shards), where)

    async def put_at(self, link: Connection, encoded: EncodedGroup) -> list[Any]:
        """Store a group; returns the receipt that the planner requires with the header, once the payload is durable. A
        shard without room is asked again.

        Raises:
            WireError: the shard refused it. NoProgress: it did not answer, or had no room for `wait_timeout_s`.
        """
        body = headers.encode_group_header(encoded.header)
        patience_s = self._config.wait_timeout_s
        until = time.monotonic() + patience_s
        try:
            while True:
                response = await asyncio.wrap_future(link.request("put", body, encoded.frames, encoded.header.nbytes))
                shard, tag, seal, _ = wire.sequence(response.body, "put reply", 4)
                if tag:
                    return [shard, tag, seal]
                if time.monotonic() > until:
                    raise NoProgress(
                        f"shard {shard} of the replay at {link.address} had no room for group "
                        f"{encoded.header.group_id} ({encoded.header.nbytes} bytes) for {patience_s:.0f} s"
                    )
                await asyncio.sleep(self._config.heartbeat_s / 2)
        except NoProgress:
            self._ask_anew()
            raise

    def get(self, rows: Sequence[Any]) -> list[Response]:
        """Fetch the parts of a lease that are in shards; all shards are asked at once.

        Args:
            rows: `[group, shard, tag, positions, with texts, group id, attempt]`.

        Raises:
            ReplayError: a shard has lost its part. NoProgress: a shard did not answer.
        """
        questions: dict[int, list[Any]] = {}
        for group, shard, tag, positions, with_texts, group_id, attempt in rows:
            wire.integer(shard, "shard", 0, self._config.shards - 1)
            questions.setdefault(shard, []).append([group, group_id, attempt, tag, positions, with_texts])
        where = self._addresses().result()
        asked = [self._link(shard, where).request("get", body) for shard, body in questions.items()]
        try:
            return [question.result() for question in asked]
        except NoProgress:
            self._ask_anew()
            raise

    def close(self) -> None:
        with self._lock:
            links = [*self._links.values(), *self._left]
        for link in links:
            link.close()

    def _ask_anew(self) -> None:
        """Forget the addresses: a silent shard may listen elsewhere by now."""
        with self._lock:
            if self._asked is not None and self._asked.done():
                self._asked = None

    def _addresses(self) -> Future[Response]:
        with self._lock:
            failed = self._asked is not None and self._asked.done() and self._asked.exception() is not None
            if self._asked is None or failed:
                self._asked = self._planner.request("shards", float(self._config.wait_timeout_s))
            return self._asked

    def _link(self, shard: int, where: Response) -> Connection:
        addresses = wire.sequence(where.body, "shard addresses", self._config.shards)
        address = wire.text(addresses[shard], "address", wire.MAX_NAME)
        with self._lock:
            known = self._links.get(shard)
            if known is None or known.address != address:
                self._left += [] if known is None else [known]
                self._links[shard] = Connection(
                    address,
                    role=self._planner.role,
                    name=self._planner.name,
                    run_digest=self._digest,
                    config=self._config,
                    server=f"shard {shard} of the replay",
                    server_role="shard",
                )
            return self._links[shard]
