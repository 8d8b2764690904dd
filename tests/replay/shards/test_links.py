"""The connection to a shard: without room, without an answer, or with an unknown address."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from asyncrl.errors import FencedError, NoProgress, WireError
from asyncrl.replay.client.client import RolloutClient
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.requests import Response
from asyncrl.replay.client.shard_links import ShardLinks
from asyncrl.replay.codec.group import EncodedGroup, encode_group
from asyncrl.replay.shards.running import meet
from asyncrl.replay.shards.store import Held, Key
from asyncrl.types import Assignment
from tests.addresses import free_address
from tests.replay.helpers import group, replay_config

pytestmark = pytest.mark.timeout(400)

ORDER = Assignment(group_id=5, prompt_index=5, attempt=0, seed=0, policy_version=0)
GROUP = group(ORDER, [0] * 3)
NO_ROOM = [0, "", "", 1]
RECEIPT = [0, "tag", "seal", 100]


class Answers:
    """In the place of a connection, or of a shard's way to the planner: says these, one after the other, then the last
    of them again and again."""

    address, role, name = "tcp://127.0.0.1:1", "worker", "w"

    def __init__(self, *said: Any) -> None:
        self._said = list(said)
        self.asked = 0

    def request(self, *question: Any) -> Future[Response]:
        self.asked += 1
        says = self._said[min(self.asked, len(self._said)) - 1]
        future: Future[Response] = Future()
        if isinstance(says, Exception):
            future.set_exception(says)
        else:
            future.set_result(Response(says, []))
        return future

    def ask(self, held: Sequence[tuple[Key, Held]], paused: str) -> Future[Response]:
        return self.request(held, paused)

    def close(self) -> None:
        """Nothing to close."""


def put_at(shard: Answers, planner: Answers, wait_timeout_s: float) -> list[Any]:
    config = replay_config(shards=1, heartbeat_s=0.01, wait_timeout_s=wait_timeout_s)
    links = ShardLinks(cast(Connection, planner), "d", config)
    links._addresses()
    try:
        return asyncio.run(links.put_at(cast(Connection, shard), encode_group(GROUP)))
    finally:
        links._addresses()


def test_a_shard_without_room_is_asked_again_until_it_has_some() -> None:
    shard, planner = Answers(NO_ROOM, NO_ROOM, RECEIPT), Answers(["tcp://127.0.0.1:1"])
    assert put_at(shard, planner, 50.0) == RECEIPT[:3]
    assert shard.asked == 3 and planner.asked == 1


@pytest.mark.parametrize("said", [NO_ROOM, NoProgress("the shard did not answer")])
def test_a_shard_that_was_of_no_use_for_too_long_is_an_error_and_the_planner_is_asked_where_it_is(said: Any) -> None:
    shard, planner = Answers(said), Answers(["tcp://127.0.0.1:1"])
    with pytest.raises(NoProgress, match=r"no room for group 5|did not answer"):
        put_at(shard, planner, 0.05)
    assert planner.asked == 2


class NoAddress:
    """In the place of `ShardLinks`."""

    async def link_for(self, encoded: EncodedGroup) -> Connection:
        raise WireError("the planner does not say where the shard is")

    def close(self) -> None:
        """Nothing to close."""


def test_only_what_a_shard_itself_refuses_is_told_to_the_planner_as_refused() -> None:
    config = replace(replay_config(), wait_timeout_s=0.5)
    client = RolloutClient(free_address(), worker="w", run_digest="d", config=config)
    client._shards = cast(ShardLinks, NoAddress())
    with pytest.raises(WireError, match="does not say"):  # NoProgress, had it asked the planner, which is not there
        asyncio.run(client.insert(GROUP))
    asyncio.run(client.close())


def test_a_shard_that_comes_too_early_asks_until_the_earlier_one_is_taken_for_dead() -> None:
    told = ["run", [], 100, [], False]
    planner = Answers(FencedError("shard 0 listens elsewhere"), told)
    first = meet(planner, threading.Event(), patience_s=60.0)
    assert first is not None and first.run_id == "run" and planner.asked == 2
    with pytest.raises(FencedError, match="elsewhere"):
        meet(Answers(FencedError("shard 0 listens elsewhere")), threading.Event(), patience_s=0.0)
    stopped = threading.Event()
    stopped.set()
    assert meet(Answers(told), stopped, patience_s=60.0) is None
