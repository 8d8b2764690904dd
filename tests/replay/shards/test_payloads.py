"""What a shard may forget, and whose receipts the planner accepts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.errors import FencedError, JournalError, ReplayError, WireError
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec.columns import Columns
from asyncrl.replay.codec.group import MAX_VOCABULARY, Elsewhere, StoredGroup, encode_group
from asyncrl.replay.codec.headers import encode_group_header
from asyncrl.replay.core.durable.events import Inserted
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.journal.records import decode_event, encode_event
from asyncrl.replay.net.keyring import make_keys
from asyncrl.replay.server.payloads import refuse_other_store
from asyncrl.replay.server.sessions import Session
from asyncrl.replay.shards.host import Shard
from asyncrl.replay.shards.payloads import Collected, InShards, free_of
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import Held, Key, ShardArchive, ShardStore
from asyncrl.types import Assignment
from benchmarks.parts.keys import some_keys
from tests.replay.helpers import group, replay_config
from tests.replay.memory_disk import MemoryDisk

ORDER = Assignment(group_id=5, prompt_index=5, attempt=0, seed=0, policy_version=0)


def life(name: str, seen: float = 0.0) -> Session:
    return Session("shard", "shard", name, b"", seen)


def test_nobody_becomes_a_shard_without_the_servers_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    own, other = Seals(str(tmp_path / "keys"), "d"), Seals(some_keys(), "d")
    payloads = InShards(2, "run", own)
    with pytest.raises(WireError, match="other keys"):
        payloads.enlist(0, "tcp://127.0.0.1:1", other.address(0, "tcp://127.0.0.1:1"), life("a"))
    assert payloads.addresses() is None
    for shard in (0, 1):
        payloads.enlist(shard, "tcp://127.0.0.1:1", own.address(shard, "tcp://127.0.0.1:1"), life("a"))
    assert payloads.addresses() == ["tcp://127.0.0.1:1"] * 2


def test_a_shard_has_one_address_until_it_is_silent_for_too_long() -> None:
    now, seals = 100.0, Seals(some_keys(), "d")
    payloads = InShards(1, "run", seals, silence_s=10.0, clock=lambda: now)
    here, there = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"

    def enlist(address: str, peer: Session) -> list[str] | None:
        payloads.enlist(0, address, seals.address(0, address), peer)
        return payloads.addresses()

    first, second = life("a", seen=now), life("b", seen=now)
    assert enlist(here, first) == [here]
    with pytest.raises(FencedError, match=r"shard 0 listens on tcp://127.0.0.1:1 .*127.0.0.1:2 has the same number"):
        enlist(there, second)
    assert payloads.addresses() == [here]
    now = 109.0
    first.seen = 108.0  # by a heartbeat
    now = 117.0
    with pytest.raises(FencedError):
        enlist(there, second)
    now = 119.0
    second.seen = now
    assert enlist(there, second) == [there]
    with pytest.raises(FencedError):  # it was only stopped, and wakes up
        enlist(here, first)
    assert enlist(there, life("c", seen=now)) == [there]  # started again at its address: the earlier one is dead


@pytest.mark.parametrize(
    ("entry", "maker", "free"),
    [
        (None, "w", True),  # committed, dropped or never issued
        (Entry(group_id=5, prompt_index=5, attempt=1, worker="w"), "w", True),  # given to another attempt
        (Entry(group_id=5, prompt_index=5, attempt=0), "w", True),  # waits to be given to another
        (Entry(group_id=5, prompt_index=5, attempt=0, worker="w"), "w", False),  # may be announced yet
        (Entry(group_id=5, prompt_index=5, attempt=0, worker="w"), "v", True),  # by somebody without that order
        (Entry(group_id=5, prompt_index=5, attempt=0, worker="w"), "", False),  # an older journal says nothing
        (Entry(group_id=5, prompt_index=5, state=GroupState.LEASED, payload=Elsewhere(1, "t")), "v", False),
        (Entry(group_id=5, prompt_index=5, state=GroupState.INSERTED, payload=Elsewhere(1, "u")), "w", True),
        (Entry(group_id=5, prompt_index=5, state=GroupState.TRAINED), "w", True),  # evicted
    ],
)
def test_a_key_is_free_when_nothing_can_ask_for_it_any_more(entry: Entry | None, maker: str, free: bool) -> None:
    entries = {} if entry is None else {5: entry}
    assert list(free_of([(Key(5, 0, "t"), maker)], entries, shard=1)) == ([0] if free else [])


def test_a_seal_speaks_for_one_run_shard_header_and_payload() -> None:
    seals = Seals(some_keys(), "digest")
    header = encode_group(group(ORDER, [0] * 3)).header
    other = encode_group(group(ORDER, [0] * 4)).header
    made = {
        seals.receipt("run", 1, header, "t"),
        seals.receipt("ruN", 1, header, "t"),
        seals.receipt("run", 0, header, "t"),
        seals.receipt("run", 1, other, "t"),
        seals.receipt("run", 1, header, "u"),
        Seals(some_keys(), "other").receipt("run", 1, header, "t"),
    }
    assert len(made) == 6
    assert seals.receipt("run", 1, replace(header, worker="x"), "t") == seals.receipt("run", 1, header, "t")


@pytest.mark.parametrize(
    ("payload", "shards", "refused"),
    [
        (StoredGroup(b"", Columns((), b"", (), ())), 0, False),
        (StoredGroup(b"", Columns((), b"", (), ())), 2, True),
        (Elsewhere(1, "t"), 2, False),
        (Elsewhere(1, "t"), 3, False),
        (Elsewhere(1, "t"), 1, True),
        (Elsewhere(0, "t"), 0, True),
        (None, 2, False),
    ],
)
def test_a_journal_whose_payloads_would_not_be_found_is_refused(payload: object, shards: int, refused: bool) -> None:
    try:
        refuse_other_store([payload], shards)
    except JournalError as error:
        assert refused and f"replay.shards={shards}" in str(error)
    else:
        assert not refused


def test_where_a_payload_is_survives_the_journal() -> None:
    header = encode_group(group(ORDER, [0] * 3)).header
    inserted = Inserted(header, Elsewhere(3, "tag"))
    assert decode_event(b"".join(encode_event(inserted))) == inserted


def test_a_rerun_without_the_journals_of_the_shards_says_what_to_copy(tmp_path: Path) -> None:
    header = encode_group(group(ORDER, [0] * 3)).header
    with pytest.raises(JournalError, match=r"shard-3 is missing.*Copy each"):
        ShardArchive(tmp_path).payload(Inserted(header, Elsewhere(3, "tag")))


class NobodyAnswers:
    """In the place of the planner."""

    def ask(self, held: Sequence[tuple[Key, Held]], paused: str) -> Future[Response]:
        return Future()

    def close(self) -> None:
        """Nothing to close."""


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 63) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


def shard_desk() -> Shard:
    config = replay_config(shards=2, max_bytes=1 << 20)
    store = ShardStore(MemoryDisk(), JournalSettings(), {"run_id": "r", "shard": 1})
    first = Collected("r", [], MAX_VOCABULARY, [], False)
    return Shard(1, store, NobodyAnswers(), Seals(some_keys(), "d"), config, first)


@hypothesis_settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_peer_asks_of_a_shard_it_is_answered_or_refused_and_nothing_is_stored(data: st.DataObject) -> None:
    desk = shard_desk()
    verb, role = data.draw(st.sampled_from([("put", "worker"), ("get", "learner"), ("put", "learner"), ("x", "shard")]))
    encoded = encode_group(group(ORDER, [0] * 3))
    parts = encode_group_header(encoded.header)
    frames = [bytes(frame) for frame in encoded.frames]
    spoilt = data.draw(st.sampled_from(("worker", "header", "frame", "all")))
    if spoilt == "all":
        parts = data.draw(JUNK)
    elif spoilt == "frame":
        frames[1] = frames[1][:-8] + data.draw(st.binary(min_size=1, max_size=7))
    else:
        parts[0 if spoilt == "worker" else 1] = data.draw(JUNK)
        # Any name will do: the server puts its peer's in its place.
        assume(spoilt != "worker" or type(parts[0]) is not str)
    body = parts if verb == "put" else [parts, *data.draw(st.lists(JUNK, max_size=5))]
    with pytest.raises((WireError, ReplayError)):
        desk.handle(Session(role, "p", "i", b"", 0.0), verb, body, frames)
    assert not desk.store.held
