"""Extras on their way through a whole replay: server, journal and rerun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.replay.audit.rerun import RetainedReplay, read_surviving
from asyncrl.replay.client.client import decode_lease
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import headers, wire
from asyncrl.replay.codec.columns import LARGE_ARRAY
from asyncrl.replay.codec.group import EncodedGroup, StoredGroup, encode_group
from asyncrl.replay.codec.lease import SEPARATE
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.durable import open_core, recover
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.replay.protocol import Lease
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.sessions import Answer, Session
from asyncrl.types import NO_VERSION, Trajectory, TrajectoryGroup
from tests.replay.fuzz import TOO_DEEP, places, put
from tests.replay.helpers import Clock, group, same_extras, same_trajectory, settings, trajectory

RUN = {"run_id": "r", "run_digest": "d", "boot": "b", "settings": {}}


def pair(extras: Mapping[str, Any]) -> tuple[Trajectory, ...]:
    """Two trajectories, the first of them with extras."""
    return replace(trajectory([0, 0, 0]), extras=extras), trajectory([0, 0, 0])


class Unread:
    """A frame that has a size; whoever looks into it fails."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Desks:
    """A desk with a worker, a learner and two orders."""

    def __init__(self, core: ReplayCore | None = None) -> None:
        self.core = core or ReplayCore(settings(groups_per_step=2, group_size=2), Clock())
        self.desk = Handlers(self.core)
        self.worker = Session("worker", "w", "a", b"id", 0.0)
        self.learner = Session("learner", "rank", "l", b"id2", 0.0)
        self.core.hello("w", "a")
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.core.served("w", "a", 0, "f")
        self.orders = self.core.acquire("w", "a", 2).assignments

    def insert(self, encoded: EncodedGroup, frames: list[Any] | None = None) -> str:
        body = [headers.encode_group_header(encoded.header), None]
        reply = self.desk.handle(self.worker, "insert", body, frames or encoded.frames)
        assert isinstance(reply, Answer)
        return reply.body[0]

    def lease(self, rank: int = 0, world: int = 1, samples: int = 0) -> Answer:
        reply = self.desk.handle(self.learner, "lease", [0, rank, world, 0.0, samples], ())
        assert isinstance(reply, Answer)
        return reply


def decoded(answer: Answer, rank: int = 0) -> Lease:
    body = wire.unpack(wire.pack(answer.body))
    return decode_lease(Response(body, [bytes(frame) for frame in answer.frames]), rank)


def test_the_server_takes_in_and_hands_out_extras_without_looking_into_them() -> None:
    desks = Desks()
    extras = {"image": np.zeros(LARGE_ARRAY, bool), **{f"x{n}": np.zeros(SEPARATE, np.uint8) for n in range(2)}}
    for order in desks.orders:
        made = replace(group(order, [0]), trajectories=pair(extras))
        encoded = encode_group(made)
        unread = [Unread(len(frame)) for frame in encoded.frames[2:]]
        assert desks.insert(encoded, [*encoded.frames[:2], *unread]) == "accepted"
    assert sum(isinstance(frame, Unread) for frame in desks.lease().frames) == 4


def test_bools_of_other_bytes_are_true_for_the_learner_and_end_nothing() -> None:
    """An honest environment makes them with `view`; the server does not look."""
    desks = Desks()
    odd = np.array([0, 1, 2, 255], np.uint8)
    extras = {"seen": odd.view(bool), "one": odd[3:].view(bool).reshape(()), "mask": np.full(LARGE_ARRAY, 7, np.uint8)}
    extras["mask"] = extras["mask"].view(bool)
    for order in desks.orders:
        made = replace(group(order, [0]), trajectories=pair(extras))
        assert desks.insert(encode_group(made)) == "accepted"
    found = decoded(desks.lease()).trajectories[0, 0].extras
    assert found["seen"].tobytes() == b"\0\1\1\1" and found["one"].tobytes() == b"\1"
    assert found["mask"].view(np.uint8).max() == 1 and found["mask"].all()
    assert all(array.dtype == bool and not array.flags.writeable for array in found.values())


def test_a_group_with_bad_extras_is_refused_and_its_maker_goes_on() -> None:
    desks = Desks()
    first, second = (encode_group(group(order, [0])) for order in desks.orders)
    longer = replace(first, header=replace(first.header, nbytes=first.header.nbytes + 8))
    with pytest.raises(WireError, match="extras of"):
        desks.insert(longer, [*first.frames[:-1], bytes(first.frames[-1]) + bytes(8)])
    assert desks.core.state.in_flight == 1
    assert desks.insert(second) == "accepted"
    assert desks.insert(second) == "duplicate"


def test_a_rank_gets_the_extras_of_its_own_trajectories_and_samples_come_without() -> None:
    desks = Desks()
    sent = {order.group_id: group(order, [0] * (LARGE_ARRAY // 4)) for order in desks.orders}
    for made in sent.values():
        encoded = encode_group(made)
        assert desks.insert(encoded) == "accepted"
    assert encoded.header.nbytes == sum(map(len, encoded.frames)) > 5 * LARGE_ARRAY
    leases = [decoded(desks.lease(rank, 2, samples=2 if rank == 0 else 0), rank) for rank in range(2)]
    for lease in leases:
        for (place, member), found in lease.trajectories.items():
            assert same_trajectory(sent[lease.plan.groups[place].group_id].trajectories[member], found)
    assert [sample.group_id for sample in leases[0].samples] == [0, 1]
    assert not any(t.extras for sample in leases[0].samples for t in sample.trajectories)
    nbytes = [sum(map(len, desks.lease(rank, 2).frames)) for rank in range(2)]
    assert sum(nbytes) < 2 * encoded.header.nbytes


NONSENSE: tuple[Any, ...] = (TOO_DEEP, None, True, -1, 1, 3, 1 << 62, 0.5, "x", b"x", [], [1 << 30] * 8, [[1]], {})


def test_nonsense_in_any_place_of_a_lease_is_a_typed_error_at_the_rank() -> None:
    desks = Desks()
    for order in desks.orders:
        made = replace(group(order, [0]), trajectories=pair({"x": np.zeros(LARGE_ARRAY, np.uint8), "y": np.arange(3)}))
        assert desks.insert(encode_group(made)) == "accepted"
    lease = desks.lease(samples=1)
    body, frames = wire.unpack(wire.pack(lease.body)), [bytes(frame) for frame in lease.frames]
    header = (0, 5, 0, 1)  # of the plan's first group
    fields = wire.unpack(body[0][5][0][1])
    refused = 0
    for item in NONSENSE:
        changed = [put(body, path, item) for path in places(body)]
        changed += [put(body, header, wire.pack(put(fields, path, item))) for path in places(fields)]
        for each in changed:
            try:
                decode_lease(Response(each, frames), 0)
            except WireError:
                refused += 1
    assert refused > 1000


def journalled(folder: Path) -> tuple[dict[int, TrajectoryGroup], Journal]:
    """One step of a run with extras, trained."""
    journal = JournalSettings(retain="all")
    core, log = open_core(FolderDisk(folder, locked=True), settings(), Clock(), journal=journal, run=RUN)
    desks = Desks(core)
    sent = {order.group_id: group(order, [0] * 20) for order in desks.orders}
    for made in sent.values():
        assert desks.insert(encode_group(made)) == "accepted"
    assert core.lease(0) is not None
    core.trained(step=0, policy_version=1)
    log.write_batch()
    return sent, log


def test_extras_are_in_the_journal_for_a_recovery_and_a_rerun(tmp_path: Path) -> None:
    sent, log = journalled(tmp_path)
    found = recover(FolderDisk(tmp_path, locked=False))
    assert found is not None
    for group_id, made in sent.items():
        entry = found.state.ledger.entry(group_id)
        assert isinstance(entry.payload, StoredGroup) and entry.header is not None
        assert all(map(same_trajectory, made.trajectories, entry.payload.trajectories(entry.header.trajectories)))
    log.close()
    replay = RetainedReplay(tmp_path, read_surviving(tmp_path), max_staleness=2, samples=4)
    lease = replay.lease(step=0, rank=0, world=1, wait_s=0)
    replay.close()
    for (place, member), one in lease.trajectories.items():
        assert same_extras(sent[lease.plan.groups[place].group_id].trajectories[member], one)
    assert any(isinstance(one, Trajectory) and one.extras for one in lease.trajectories.values())
