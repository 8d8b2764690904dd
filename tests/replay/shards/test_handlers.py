"""What a shard accepts and from whom, what it reports to the planner, and what it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from asyncrl.errors import FencedError, ReplayError, WireError
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec.group import MAX_VOCABULARY, EncodedGroup, encode_group
from asyncrl.replay.codec.headers import encode_group_header
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.server.sessions import Answer, Session
from asyncrl.replay.shards.host import MOST, SPARE, Shard
from asyncrl.replay.shards.payloads import Collected, InShards, with_shards
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import Held, Key, ShardStore
from asyncrl.types import NO_VERSION, Assignment
from benchmarks.parts.keys import some_keys
from tests.replay.helpers import Clock, group, replay_config, settings
from tests.replay.memory_disk import MemoryDisk

pytestmark = pytest.mark.timeout(400)


def encoded(group_id: int, first_token: int = 0, tokens: int = 3) -> EncodedGroup:
    """The payload differs with `first_token`."""
    order = Assignment(group_id=group_id, prompt_index=group_id, attempt=0, seed=0, policy_version=0)
    made = group(order, [0] * tokens)
    one = replace(made.trajectories[0], token_ids=made.trajectories[0].token_ids + first_token)
    return encode_group(replace(made, trajectories=(one, *made.trajectories[1:])))


NBYTES = encoded(0).header.nbytes


class Planner:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[tuple[Key, Held]], str]] = []
        self.answer: Future[Response] = Future()

    def ask(self, held: Sequence[tuple[Key, Held]], paused: str) -> Future[Response]:
        self.asked.append((held, paused))
        self.answer = Future()
        return self.answer

    def close(self) -> None:
        """Nothing to close."""


def shard(max_bytes: int) -> tuple[Shard, Planner]:
    planner = Planner()
    store = ShardStore(MemoryDisk(), JournalSettings(), {"run_id": "r", "shard": 0})
    config, first = replay_config(shards=1, max_bytes=max_bytes), Collected("r", [], MAX_VOCABULARY, [], False)
    return Shard(0, store, planner, Seals(some_keys(), "d"), config, first), planner


def peer(role: str, name: str) -> Session:
    return Session(role, name, name, b"", 0.0)


def put(desk: Shard, worker: str, sent: EncodedGroup) -> bool:
    """Whether there was room."""
    desk.hello(worker, worker)
    body = encode_group_header(sent.header)
    reply = desk.handle(peer("worker", worker), "put", body, [bytes(frame) for frame in sent.frames])
    assert isinstance(reply, Answer)
    assert reply.body[-1] >= 1  # credit: nobody has to wait without a word
    return bool(reply.body[1])


def test_a_worker_that_fills_its_part_of_a_shard_leaves_others_room_and_no_number_of_them_passes_the_bound() -> None:
    desk, _ = shard(max_bytes=2 * NBYTES)
    taken = [put(desk, "greedy", encoded(number)) for number in range(20)]
    assert sum(taken) == 2 * SPARE and taken[: 2 * SPARE] == [True] * 2 * SPARE
    assert put(desk, "honest", encoded(100))
    for worker in ("greedy 2", "greedy 3", "greedy 4"):
        for number in range(20):
            put(desk, worker, encoded(200 + number, first_token=ord(worker[-1])))
    assert desk.store.nbytes == MOST * 2 * NBYTES
    assert put(desk, "honest", encoded(100))  # it is there already: the answer was lost
    assert not put(desk, "honest", encoded(101))


def test_a_worker_may_send_two_payloads_of_an_attempt_and_does_not_use_up_those_of_another() -> None:
    desk, _ = shard(max_bytes=100 * NBYTES)
    for token in range(2):
        assert put(desk, "foreign", encoded(5, first_token=token))
    with pytest.raises(WireError, match="2 payloads of group 5"):
        put(desk, "foreign", encoded(5, first_token=2))
    assert put(desk, "own", encoded(5, first_token=3))
    assert {held.maker for held in desk.store.held.values()} == {"foreign", "own"}


def test_a_group_that_no_shard_could_ever_take_is_refused_rather_than_asked_for_again() -> None:
    desk, _ = shard(max_bytes=NBYTES // 4)
    with pytest.raises(WireError, match=r"Raise replay\.max_bytes"):
        put(desk, "w", encoded(5))


@pytest.mark.parametrize("again_by", ["w", "another"])
def test_what_is_put_again_while_the_planner_is_asked_is_not_forgotten_by_its_answer(again_by: str) -> None:
    desk, planner = shard(max_bytes=100 * NBYTES)
    host = desk
    assert put(desk, "w", encoded(5)) and put(desk, "w", encoded(6))
    host.expire()
    ((held, _),) = planner.asked
    assert [key.group_id for key, _ in held] == [5, 6]
    assert put(desk, again_by, encoded(5))
    planner.answer.set_result(Response(["r", [0, 1], MAX_VOCABULARY, [], False], []))
    host.expire()
    assert [(key.group_id, item.maker) for key, item in host.store.held.items()] == [(5, again_by)]


def test_a_shard_learns_from_the_planner_what_every_group_brings() -> None:
    desk, planner = shard(max_bytes=100 * NBYTES)
    assert put(desk, "w", encoded(5))
    desk.expire()
    planner.answer.set_result(Response(["r", [], MAX_VOCABULARY, [3, 2, 5], False], []))
    desk.expire()
    with pytest.raises(WireError, match="extras has no 'routed_experts'"):
        put(desk, "w", encoded(6))


def test_a_shard_that_the_planner_has_replaced_ends() -> None:
    desk, planner = shard(max_bytes=100 * NBYTES)
    desk.expire()
    planner.answer.set_exception(FencedError("shard 0 listens elsewhere"))
    with pytest.raises(FencedError):
        desk.expire()


def test_while_a_shard_cannot_write_nothing_new_is_started_and_the_reason_is_said() -> None:
    core, seals = ReplayCore(settings(), Clock()), Seals(some_keys(), "d")
    payloads = InShards(2, "r", seals)
    desk = with_shards(core, payloads)
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None)
    core.publish(policy_version=0, parent=NO_VERSION)
    core.hello("w", "i")
    core.served("w", "i", 0, "f")

    def collect(number: int, paused: str) -> None:
        address = f"tcp://127.0.0.1:{number + 1}"
        body = [number, address, seals.address(number, address), paused, []]
        desk.handle(peer("shard", f"shard {number}"), "collect", body, [])

    collect(0, "")
    collect(1, "the disk is full")
    assert core.acquire("w", "i", 1).waiting_for == "shard 1: the disk is full"
    assert not core.has_work() and core.explain(0).startswith("shard 1: the disk is full")
    core.paused = "mine too"
    assert core.acquire("w", "i", 1).waiting_for == "mine too; shard 1: the disk is full"
    core.paused = ""
    collect(0, "")
    assert core.acquire("w", "i", 1).waiting_for
    collect(1, "")
    assert core.has_work() and len(core.acquire("w", "i", 1).assignments) == 1


def test_a_shard_tells_the_planner_why_it_cannot_write() -> None:
    desk, planner = shard(max_bytes=NBYTES)
    desk.paused = "the disk is full"
    desk.expire()
    assert planner.asked == [([], "the disk is full")]


def test_a_payload_that_is_not_there_is_an_error_and_not_an_empty_answer() -> None:
    desk, _ = shard(max_bytes=NBYTES)
    with pytest.raises(ReplayError, match="does not have the payload of group 9"):
        desk.handle(peer("learner", "rank 0"), "get", [[0, 9, 0, "t", [0], True]], [])
