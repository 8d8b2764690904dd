"""Whose journal it is and whether its run is over are known before anything in it is deleted."""

from __future__ import annotations

import collections

import pytest

from asyncrl.errors import JournalError
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.durable import open_core, recover
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.replay.journal.recovery import read_history, unfinished_run
from asyncrl.replay.journal.segments import segment_name, segment_numbers
from tests.replay.helpers import Clock, settings
from tests.replay.memory_disk import MemoryDisk

RUN = {"run_id": "r", "run_digest": "d", "boot": "b"}


class CountingDisk(MemoryDisk):
    """`heads` counts how often the beginning of a file was read."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: collections.Counter[str] = collections.Counter()

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        self.heads[name] += offset == 0
        return super().read(name, offset, nbytes)


def life(disk: MemoryDisk) -> tuple[ReplayCore, Journal]:
    """A server on `disk` whose learner has restored."""
    journal = JournalSettings(segment_bytes=2048)
    core, writer = open_core(disk, settings(), Clock(), journal=journal, run=RUN)
    core.restore(step=None, policy_version=-1, snapshot=None, incarnation="l")
    writer.write_batch()
    return core, writer


def test_a_run_is_unfinished_until_its_learner_says_so() -> None:
    disk = MemoryDisk()
    assert unfinished_run(disk) is None
    core, writer = life(disk)
    assert unfinished_run(disk) == "r"
    core.finish()
    writer.write_batch()
    assert unfinished_run(disk) is None


def test_settings_that_only_a_segments_head_tells_are_in_the_history() -> None:
    journal, smaller = JournalSettings(segment_bytes=2048, retain="all"), settings(groups_per_step=1)
    lost, kept = MemoryDisk(), MemoryDisk()
    for disk in (lost, kept):
        core, writer = open_core(disk, settings(groups_per_step=2), Clock(), journal=journal, run=RUN)
        core.restore(step=None, policy_version=-1, snapshot=None, incarnation="l")
        writer.write_batch()
    # Power fails when the head of the next server's segment is durable, and what it says next is not.
    found = recover(lost)
    assert found is not None
    identity = {**RUN, "settings": smaller.plain()}
    Journal(lost, journal, identity, found.state, found.end, found.places).write_batch()
    for disk in (lost, kept):
        core, writer = open_core(disk, smaller, Clock(), journal=journal, run=RUN)
        core.publish(policy_version=0, parent=-1)
        writer.write_batch()
        history = [event for _, event in read_history(disk)]
        assert history.count(ev.Configured(smaller.plain())) == 1
        assert history.index(ev.Configured(smaller.plain())) < history.index(ev.Published(0, -1))


def test_of_a_damaged_journal_nobody_says_that_its_run_is_over() -> None:
    disk = MemoryDisk()
    life(disk)
    disk.flip(segment_name(segment_numbers(disk)[-1]), 40)
    with pytest.raises(JournalError, match="damaged"):
        unfinished_run(disk)


def test_only_the_newest_segment_is_read_again_after_the_heads() -> None:
    disk = CountingDisk()
    for _ in range(4):  # Each life begins another segment.
        life(disk)
    disk.heads.clear()
    assert unfinished_run(disk) == "r"
    *older, newest = map(segment_name, segment_numbers(disk))
    # The first record takes two reads, of its header and of all of it.
    assert older and all(disk.heads[name] <= 2 for name in older) and disk.heads[newest] <= 3
