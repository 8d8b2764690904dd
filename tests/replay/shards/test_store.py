"""A shard's store on an in-memory disk that loses power: acknowledged payloads are kept, released ones are not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.errors import JournalError
from asyncrl.replay.codec.group import StoredGroup, encode_group, shard_of, split_frames
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.journal.recovery import run_of
from asyncrl.replay.journal.segments import segment_name, segment_numbers
from asyncrl.replay.shards.store import (
    Key,
    ShardStore,
    open_store,
    read_positions,
    read_stored,
)
from asyncrl.types import Assignment, GroupHeader
from tests.replay.helpers import group
from tests.replay.memory_disk import MemoryDisk

pytestmark = pytest.mark.timeout(400)

RUN = {"run_id": "r", "shard": 0}


def made(number: int, attempt: int = 0, tokens: int = 3) -> tuple[GroupHeader, StoredGroup]:
    order = Assignment(group_id=number, prompt_index=number, attempt=attempt, seed=0, policy_version=0)
    encoded = encode_group(group(order, [0] * tokens))
    return encoded.header, split_frames(encoded.header, encoded.frames)


def opened(disk: MemoryDisk, retain: str = "none") -> ShardStore:
    return open_store(disk, JournalSettings(segment_bytes=4096, retain=retain), RUN)


def bytes_of(stored: StoredGroup | None) -> list[bytes]:
    assert stored is not None
    return [bytes(frame) for frame in stored.frames]


def same(store: ShardStore, key: Key, payload: StoredGroup) -> bool:
    return bytes_of(store.find(key)) == bytes_of(payload)


ACTIONS = st.lists(st.sampled_from(("put", "put", "again", "release", "write", "kill", "power")), max_size=60)


@hypothesis_settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 1000), retain=st.sampled_from(("none", "all")))
def test_whatever_dies_an_acknowledged_payload_is_there_until_it_is_released(
    actions: list[str], seed: int, retain: str
) -> None:
    dice = random.Random(seed)
    disk = MemoryDisk()
    store = opened(disk, retain=retain)
    groups: dict[Key, tuple[GroupHeader, StoredGroup]] = {}
    acknowledged: set[Key] = set()
    for number, action in enumerate(actions):
        if action == "put":
            one = made(number, tokens=dice.choice((1, 3, 40)))
            groups[store.put(*one)] = one
        elif action == "again" and groups:
            key = dice.choice(list(groups))
            before = store.promised
            held = key in store.held
            assert store.put(*groups[key]) == key
            assert (store.promised == before) == held
        elif action == "release" and store.held:
            key = dice.choice(list(store.held))
            assert store.release([key, key]) == 1
            acknowledged.discard(key)
        elif action == "write":
            assert store.write_batch()
            acknowledged |= set(store.held)
        elif action in ("kill", "power"):
            disk = disk.copy() if action == "kill" else disk.power_loss(dice)
            store = opened(disk, retain=retain)
        for key in acknowledged:
            assert same(store, key, groups[key][1])
        assert store.nbytes == sum(held.nbytes for held in store.held.values())
    store.write_batch()
    for key in store.held:
        stored = read_stored(disk, store.held[key].position)
        assert stored is not None and bytes_of(stored.payload) == bytes_of(groups[key][1])


def test_a_group_sent_twice_is_kept_once_and_another_one_of_its_attempt_beside_it() -> None:
    store = opened(MemoryDisk())
    header, payload = made(5)
    key = store.put(header, payload)
    assert store.put(replace(header, worker="somebody else"), payload) == key
    other = store.put(*made(5, tokens=4))
    assert other != key and other.group_id == key.group_id
    assert len(store.held) == 2


def test_segments_whose_payloads_are_released_are_written_again() -> None:
    disk = MemoryDisk()
    store = opened(disk)
    kept = store.put(*made(0))
    for number in range(1, 300):
        store.release([store.put(*made(number))])
        store.write_batch()
    assert len(segment_numbers(disk)) < 8
    again = opened(disk.copy())
    assert set(again.held) == {kept}
    assert same(again, kept, made(0)[1])


def test_a_journal_that_keeps_all_finds_what_was_released_long_ago() -> None:
    disk = MemoryDisk()
    store = opened(disk, retain="all")
    keys = [store.put(*made(number)) for number in range(100)]
    store.release(keys)
    store.write_batch()
    found = read_positions(disk)
    assert set(found) == set(keys)
    stored = read_stored(disk, found[keys[7]])
    assert stored is not None and bytes_of(stored.payload) == bytes_of(made(7)[1])


def test_the_journal_of_another_shard_or_run_is_refused() -> None:
    disk = MemoryDisk()
    store = opened(disk)
    store.put(*made(1))
    store.write_batch()
    for other in ({"run_id": "r", "shard": 1}, {"run_id": "x", "shard": 0}):
        with pytest.raises(JournalError, match="another run"):
            open_store(disk.copy(), JournalSettings(), other)


def test_a_journal_says_of_which_run_it_is_unless_it_is_damaged() -> None:
    disk = MemoryDisk()
    assert run_of(disk) is None
    store = opened(disk)
    store.put(*made(1))
    store.write_batch()
    assert run_of(disk) == "r"
    newest = segment_name(segment_numbers(disk)[-1])
    disk.flip(newest, 40)
    assert run_of(disk) is None


def test_whose_a_payload_is_survives_and_the_last_to_send_it_has_it() -> None:
    disk = MemoryDisk()
    store = opened(disk)
    header, payload = made(5)
    key = store.put(replace(header, worker="first"), payload)
    assert store.put(replace(header, worker="second"), payload) == key
    assert store.bytes_by == {"second": header.nbytes} and store.tags_by == {(5, 0, "second"): 1}
    store.write_batch()
    for number in range(100, 200):  # its record is left behind in an older segment
        store.release([store.put(*made(number))])
        store.write_batch()
    again = opened(disk.copy())
    assert {known: held.maker for known, held in again.held.items()} == {key: "second"}
    assert again.nbytes == header.nbytes
    assert again.bytes_by == {"second": header.nbytes} and again.tags_by == {(5, 0, "second"): 1}
    again.release([key])
    assert not again.bytes_by and not again.tags_by


def test_every_shard_gets_its_share_of_any_batch() -> None:
    for shards in (1, 2, 3, 8):
        counts = [sum(shard_of(number, shards) == shard for number in range(100, 124)) for shard in range(shards)]
        assert counts == [24 // shards] * shards
