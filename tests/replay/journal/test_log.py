"""The journal on a disk in memory that loses power, fills up and rots; every promise checked after every loss."""

from __future__ import annotations

import errno
import random
from dataclasses import is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.errors import JournalError, ReplayError, WireError
from asyncrl.replay.codec import wire
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.durable import open_core, recover
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.replay.journal.records import KINDS, SCHEMA, decode_event, encode_event
from asyncrl.replay.journal.recovery import read_history, segment_chain
from asyncrl.replay.journal.segments import segment_name, segment_numbers
from asyncrl.types import Assignment, DropReason
from tests.replay.helpers import Clock, header, settings
from tests.replay.memory_disk import MemoryDisk

pytestmark = pytest.mark.timeout(400)

RUN = {"run_id": "r", "run_digest": "d", "boot": "b"}
ADMISSION = settings(groups_per_step=2, pipeline_depth=1)


class Life:
    """One life of a server on a disk, with a worker and a learner that do what real ones do."""

    def __init__(self, disk: MemoryDisk, seed: int = 0, **journal: Any) -> None:
        self.disk, self.random = disk, random.Random(seed)
        self.events: list[ev.Event] = []
        self.core: ReplayCore
        self.journal: Journal
        self.core, self.journal = open_core(
            disk,
            ADMISSION,
            Clock(),
            journal=JournalSettings(**({"segment_bytes": 2048} | journal)),
            run=RUN,
            listener=self.events.append,
        )
        self.requests = 0
        self.orders: list[Assignment] = []

    def begin(self) -> None:
        learner = f"l{self.random.random()}"
        state = self.core.state
        step = state.committed_step if state.committed_step >= 0 else None
        restored = self.core.restore(step=step, policy_version=-1, snapshot=None, incarnation=learner)
        self.core.publish(policy_version=restored.next_version, parent=state.tree.newest)
        self.incarnation = f"w{self.random.random()}"
        self.core.hello("w", self.incarnation)
        self.load()

    def load(self) -> None:
        self.core.served("w", self.incarnation, self.core.state.version, "f")

    def act(self) -> None:
        core, state = self.core, self.core.state
        choice = self.random.random()
        if choice < 0.5:
            self.requests += 1
            self.orders += core.acquire("w", self.incarnation, 3, self.requests).assignments
            self.random.shuffle(self.orders)
            while self.orders and self.random.random() < 0.7:
                order = self.orders.pop()
                if self.random.random() < 0.15:
                    core.fail("w", self.incarnation, order.group_id, order.attempt, DropReason.FAILED_REWARD)
                else:
                    made = header(order, (state.version, 3))
                    core.insert("w", self.incarnation, made, f"payload {order.group_id} ".encode() * 9)
        elif choice < 0.8:
            if core.lease(state.trained_steps) is not None:
                core.trained(step=state.trained_steps, policy_version=state.tree.newest + 1)
                self.load()
        elif choice < 0.9 and state.trained_steps:
            core.commit(self.random.randrange(state.trained_steps))
        else:
            core.announce({"note": self.requests})


def same(a: ReplayState, b: ReplayState) -> None:
    assert a.image() == b.image()
    for group, entry in a.ledger.entries.items():
        assert entry.payload == b.ledger.entries[group].payload, group


def prefix_state(events: list[ev.Event], count: int, start: MemoryDisk | None = None) -> ReplayState:
    found = recover(start) if start else None
    state = found.state if found else ReplayState()
    for event in events[:count]:
        state.apply(event)
    return state


@hypothesis_settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), retain=st.sampled_from(("none", "window", "all")))
def test_after_any_power_loss_all_that_was_promised_is_there_and_the_rest_is_a_prefix(seed: int, retain: str) -> None:
    chance, disk = random.Random(seed), MemoryDisk()
    for life in range(4):
        server = Life(disk, seed + life, retain=retain, window_bytes=4096)
        promised = 0
        server.begin()
        for _ in range(chance.randrange(40)):
            server.act()
            if chance.random() < 0.4:
                server.journal.write_batch()
                promised = len(server.events)
        after = disk.power_loss(chance)
        found = recover(after)
        count = 0 if found is None else found.state.applied - (server.core.state.applied - len(server.events))
        assert promised <= count <= len(server.events) or (found is None and life == 0 and not promised)
        disk = after


@hypothesis_settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_what_is_recovered_is_the_very_state_that_the_events_up_to_there_make(seed: int) -> None:
    chance, disk = random.Random(seed), MemoryDisk()
    server = Life(disk, seed)
    server.begin()
    for _ in range(60):
        server.act()
        if chance.random() < 0.3:
            server.journal.write_batch()
    found = recover(disk.power_loss(chance))
    assert found is None or found.state.applied <= len(server.events)
    if found is not None:
        same(found.state, prefix_state(server.events, found.state.applied))


def test_the_history_is_all_events_in_order_when_all_is_retained() -> None:
    disk = MemoryDisk()
    told: list[ev.Event] = []
    for life in range(3):
        server = Life(disk, life, retain="all")
        server.begin()
        for _ in range(40):
            server.act()
            server.journal.write_batch()
        told += server.events
        disk = disk.power_loss(random.Random(life))
    assert len(segment_chain(disk)) >= 4
    (_, first), *rest = read_history(disk)
    assert isinstance(first, ev.Snapshotted) and first.previous_end == -1
    assert first.run["run_id"] == "r" and first.run["settings"]["max_staleness"] == 2
    assert [event for _, event in rest] == told
    positions = [position for position, _ in rest]
    assert positions == sorted(positions)


def test_segments_are_used_again_and_only_when_nothing_in_them_is_needed() -> None:
    disk = MemoryDisk()
    server = Life(disk, 1)
    server.begin()
    most = 0
    for turn in range(800):
        server.act()
        server.journal.write_batch()
        if turn % 4 == 0 and server.core.state.trained_steps:
            server.core.commit(server.core.state.trained_steps - 1)
        if turn % 50 == 0:
            server.journal.write_batch()
            same(recover(disk.power_loss(random.Random(turn))).state, server.core.state)  # type: ignore[union-attr]
        most = max(most, len(disk.names()))
    assert server.journal._number > 20, "the test is to go through many segments"
    assert most <= 12


def test_a_full_disk_loses_nothing_that_was_durable_and_writes_on_when_there_is_space() -> None:
    disk = MemoryDisk(room=3 * 2048)
    server = Life(disk, 2, retain="all")
    server.begin()
    with pytest.raises(OSError, match="no space left"):
        for _ in range(10_000):
            server.act()
            server.journal.write_batch()
    behind = server.journal.durable
    assert behind < server.journal.promised
    disk.room = None
    server.journal.write_batch()
    same(recover(disk.power_loss(random.Random(0))).state, server.core.state)  # type: ignore[union-attr]


def test_a_failed_sync_ends_the_journal_with_the_file_named() -> None:
    disk = MemoryDisk()
    server = Life(disk)
    server.journal.write_batch()
    server.begin()
    disk.fail_with = errno.EIO
    with pytest.raises(JournalError, match=r"00000000\.seg could not be written"):
        server.journal.write_batch()


def busy_disk(seed: int = 3) -> tuple[MemoryDisk, Life]:
    disk = MemoryDisk()
    server = Life(disk, seed, segment_bytes=1 << 16)
    server.begin()
    for _ in range(30):
        server.act()
        server.journal.write_batch()
    return disk, server


def test_a_bit_that_flips_before_the_durable_mark_is_refused_with_file_and_byte() -> None:
    disk, server = busy_disk()
    end = server.journal.durable
    chance = random.Random(0)
    for _ in range(200):
        damaged = disk.copy()
        damaged.flip(segment_name(0), chance.randrange(end & 0xFFFFFFFFF), chance.randrange(8))
        try:
            found = recover(damaged)
        except JournalError as error:
            assert "00000000.seg is damaged at byte" in str(error)
        else:  # A flip in padding or in an unused field of a header harms nothing.
            same(found.state, server.core.state)  # type: ignore[union-attr]


def test_an_unfinished_tail_is_cut_off_and_never_comes_back() -> None:
    """Whole records behind a torn one must not be found again once new ones were written before them."""
    disk, server = busy_disk()
    durable = server.core.state.applied
    for _ in range(10):
        server.act()
    torn = disk.power_loss(random.Random(0))
    tail = b"".join(bytes(piece) for item in server.journal._queue for piece in getattr(item, "pieces", []))
    start = server.journal.durable
    torn.write(segment_name(0), start, [bytes(40), tail[40:]])
    found = recover(torn)
    assert found is not None and found.state.applied == durable
    second = Life(torn, 9)
    second.begin()
    second.journal.write_batch()
    same(recover(torn).state, second.core.state)  # type: ignore[union-attr]


def test_an_older_segment_that_lost_a_record_is_refused_by_readers_of_the_history() -> None:
    disk = MemoryDisk()
    server = Life(disk, 4, retain="all")
    server.begin()
    for _ in range(60):
        server.act()
        server.journal.write_batch()
    disk.flip(segment_name(1), 900)
    with pytest.raises(JournalError, match=r"00000001\.seg is damaged at byte"):
        list(read_history(disk))
    disk.flip(segment_name(2), 8)
    with pytest.raises(JournalError, match=r"0000000[12]\.seg is damaged at byte"):
        list(read_history(disk))


def test_a_lost_payload_of_an_older_segment_is_found_at_the_start() -> None:
    disk = MemoryDisk()
    server = Life(disk, 5)
    server.begin()
    while not server.journal.places or max(server.journal.places.values()) >> 36 < 3:
        server.act()
        server.journal.write_batch()
    while min(server.journal.places.values()) >> 36 == server.journal._number:
        server.act()
        server.journal.write_batch()
    position = min(at for group, at in server.journal.places.items() if group in server.core.state.ledger.entries)
    disk.flip(segment_name(position >> 36), (position & 0xFFFFFFFFF) + 100)
    if recover_raises(disk):
        return
    pytest.skip("the group was dropped in between")


def recover_raises(disk: MemoryDisk) -> bool:
    try:
        recover(disk)
    except JournalError as error:
        return "is damaged at byte" in str(error)
    return False


def test_every_event_survives_its_record_and_unknown_ones_are_refused() -> None:
    disk, server = busy_disk()
    kinds = set()
    for event in server.events:
        kinds.add(type(event).__name__)
        assert decode_event(b"".join(encode_event(event))) == event
    assert len(kinds) > 8
    with pytest.raises(WireError, match="unknown kind 'Exploded'"):
        decode_event(framed([SCHEMA, "Exploded", []]))
    for other in (1, SCHEMA - 1, SCHEMA + 1):
        with pytest.raises(WireError, match=f"has schema {other}, this asyncrl reads schema {SCHEMA}"):
            decode_event(framed([other, "Finished", []]))
    with pytest.raises(WireError):
        decode_event(framed([SCHEMA, "Trained", [1]]))
    assert set(KINDS) == {
        name for name, kind in vars(ev).items() if is_dataclass(kind) and kind.__module__ == ev.__name__
    }
    assert segment_numbers(disk) == [0]


def test_a_refused_request_leaves_nothing_in_the_journal_that_would_stop_a_recovery() -> None:
    _, server = busy_disk()
    core, newest = server.core, server.core.state.tree.newest
    before = len(server.events)
    with pytest.raises(ReplayError, match="never published"):
        core.publish(policy_version=newest + 1, parent=newest + 7)
    with pytest.raises(ReplayError, match="cannot be read"):
        core.restore(step=900, policy_version=-1, snapshot={"schema": 4, "step": 900}, incarnation="new")
    assert len(server.events) == before
    server.journal.write_batch()
    same(recover(server.disk.copy()).state, core.state)  # type: ignore[union-attr]


def framed(head: Any) -> bytes:
    data = wire.pack(head)
    return len(data).to_bytes(4, "little") + data


def test_the_image_holds_everything_the_state_is_made_of() -> None:
    """Whoever adds to the state adds to its image, or a restart forgets it."""
    _, server = busy_disk(6)
    state = server.core.state
    again = ReplayState()
    again.load(wire.unpack(wire.pack(state.image())))
    older = {**state.image(), "peers": state.peers.image()[:7]}
    ReplayState().load(wire.unpack(wire.pack(older)))  # which did not say whose learner it is
    again.applied += 1
    for group, entry in again.ledger.entries.items():
        entry.payload = state.ledger.entries[group].payload
    assert plain(again) == plain(state)


def plain(value: Any) -> Any:
    """Anything as nested dictionaries and lists, private fields included; functions left out."""
    if isinstance(value, dict):
        return {repr(key): plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return [plain(item) for item in value]
    if hasattr(value, "__slots__") and not isinstance(value, (str, bytes, int)):
        return {name: plain(getattr(value, name)) for name in value.__slots__ if hasattr(value, name)}
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return {name: plain(item) for name, item in vars(value).items() if not callable(item) and name != "_handlers"}
    return value
