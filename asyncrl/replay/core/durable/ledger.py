"""Tracks the state of every admitted group, and checks that none is lost and none is trained twice.

    in_flight -> inserted -> leased(step) -> trained(step) -> committed
        │          │   ^        │              │
        │          │   └────────┼── used again ┘   (replay.max_times_sampled > 1, until it is over-age or used up)
        └──────────┴────────────┴──> dropped(reason), if it was never trained

    admitted = in_flight + inserted + leased + trained + sum(dropped.values())        (trained includes committed)

A restore of the learner moves `trained` back to `leased`, or to `in_flight` if the payload is gone.

The life cycle of a slot. A slot is the right to have one untrained group in progress: there are
`(1 + pipeline_depth) * groups_per_step` of them, and `max_in_flight` places for groups that are not finished.

              charged by                                    freed by
    slot      admission; a restore that undoes training     trained; dropped
    place     admission; a restore, if the payload is gone  inserted; dropped
    memory    inserted                                      committed; dropped; released (the journal has it)

By sample (`replay.admission=sample`) all this holds for each member separately: a straggler keeps its own place, not
those of its finished siblings. A group charges a slot and a place for each of its members, all at once, and its members
are leased, trained and found too old together: see `siblings.py`.

A group that failed keeps both until its next attempt ends; one that is to be trained once more keeps its slot. Groups
that a restore has planned for steps beyond the window charge nothing: they are trained without generating anything.

Example: two groups per step, one step ahead, so four slots; three groups may be in flight.

>>> from asyncrl.replay.core.admission import AdmissionSettings
>>> from asyncrl.replay.core.core import ReplayCore
>>> from asyncrl.types import NO_VERSION, DropReason, GroupHeader, TrajectoryHeader
>>> numbers = {"groups_per_step": 2, "pipeline_depth": 1, "max_in_flight": 3, "max_staleness": 1, "group_size": 1}
>>> core = ReplayCore(AdmissionSettings(**numbers), lambda: 0.0)
>>> restored = core.restore(step=None, policy_version=NO_VERSION, snapshot=None)
>>> core.publish(policy_version=0, parent=NO_VERSION)
>>> core.hello("worker", "life 1", 0)
>>> def ask():
...     return [order.group_id for order in core.acquire("worker", "life 1", slots=9).assignments]
>>> def bring(group, version=0):
...     trajectory = TrajectoryHeader(length=2, prompt_length=1, reward=1.0, version_tokens=((version, 1),))
...     header = GroupHeader(group_id=group, prompt_index=group, attempt=0, worker="worker", trajectories=(trajectory,))
...     return core.insert("worker", "life 1", header, b"payload").status
>>> ask()  # four slots are free, three places
[0, 1, 2]
>>> bring(0), ask()  # a place is free again: the last slot is charged
('accepted', [3])
>>> bring(1), ask()  # two places are free, no slot: 0 and 1 are inserted, 2 and 3 in flight
('accepted', [])
>>> [group.group_id for group in core.lease(0).groups], ask()  # leased is not trained
([0, 1], [])
>>> core.fail("worker", "life 1", 2, 0, DropReason.FAILED_REWARD)
>>> ask()  # 2 is tried again, in its slot and its place
[2]
>>> reply = core.trained(step=0, policy_version=1)
>>> core.served("worker", "life 1", 1, "fingerprint")
>>> ask()  # two slots are free, one place
[4]
>>> core.fail("worker", "life 1", 3, 0, DropReason.FILTERED)
>>> ask()  # dropped: its slot and its place are free
[5]
>>> core.commit(0)
>>> ask()  # a commit frees memory: 2, 4 and 5 are in flight, the fourth slot has no place
[]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from asyncrl.errors import LedgerError
from asyncrl.types import DropReason, GroupHeader


class GroupState(str, Enum):
    IN_FLIGHT = "in_flight"
    INSERTED = "inserted"
    LEASED = "leased"
    TRAINED = "trained"


_LEGAL = {
    (GroupState.IN_FLIGHT, GroupState.INSERTED),
    (GroupState.INSERTED, GroupState.LEASED),
    (GroupState.LEASED, GroupState.TRAINED),
    (GroupState.TRAINED, GroupState.LEASED),
    (GroupState.TRAINED, GroupState.IN_FLIGHT),
    (GroupState.TRAINED, GroupState.INSERTED),
    (GroupState.INSERTED, GroupState.TRAINED),
    (GroupState.LEASED, GroupState.INSERTED),
}
"""TRAINED goes back to LEASED and IN_FLIGHT only when the learner is restored to an earlier step, to INSERTED also when
the group is used again; INSERTED becomes TRAINED when a group that was trained before will not be used again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A group (by sample: a member) that is neither dropped nor committed."""

    group_id: int
    prompt_index: int
    attempt: int = 0
    failures: int = 0
    """Attempts that count towards `max_attempts`."""
    worker: str = ""
    """Name of the worker that holds the current attempt; empty while the group waits to be issued again."""
    incarnation: str = ""
    served_version: int = 0
    """No token of the current attempt can be older than this version."""
    issued_version: int = -1
    """The newest policy version when the current attempt was issued."""
    request: int = -1
    """Number of the worker's request that was answered with the current attempt; -1: not known."""
    state: GroupState = GroupState.IN_FLIGHT
    planned: list[int] = field(default_factory=list)
    """Sealed, untrained steps that contain it, in order."""
    kept: list[int] = field(default_factory=list)
    """Trained, uncommitted steps that contain it, in order."""
    trained: int = 0
    """Number of steps of the surviving history that trained it, including committed ones."""
    header: GroupHeader | None = None
    payload: Any = None
    first: int = -1
    """For a member of a group admitted by sample: the id of the group's first member; -1: this is a whole group."""
    siblings: int = 0
    """Number of members that group was begun with."""

    @property
    def whose(self) -> int:
        """Id shared by all members of a group."""
        return self.first if self.siblings else self.group_id


class Ledger:
    """Counts and entries. Independent of versions, workers and time."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.admitted = 0
        self.committed = 0
        self.sizes: Counter[int] = Counter()
        """Number of open entries by `siblings`."""
        self.counts = dict.fromkeys(GroupState, 0)
        self.dropped = dict.fromkeys(DropReason, 0)

    def admit(self, entry: Entry) -> None:
        """Add an entry in flight. Raises LedgerError if its id is open already."""
        if entry.group_id in self.entries:
            raise LedgerError(f"group {entry.group_id} was admitted twice")
        self.entries[entry.group_id] = entry
        self.sizes[entry.siblings] += 1
        self.admitted += 1
        self.counts[GroupState.IN_FLIGHT] += 1

    def begin(self, first: int, siblings: int, prompt_index: int) -> dict[int, Entry]:
        """Admit the members of a group, none of them tried yet. Raises LedgerError if an id is open already."""
        entries: dict[int, Entry] = {}
        for each in range(first, first + siblings):
            entry = Entry(group_id=each, prompt_index=prompt_index, attempt=-1, first=first, siblings=siblings)
            self.admit(entry)
            entries[each] = entry
        return entries

    def together(self, group_id: int) -> list[Entry]:
        """The remaining members of this entry's group, by id. Raises LedgerError if it is not open."""
        entry = self.entry(group_id)
        if not entry.siblings:
            return [entry]
        return [self.entries[each] for each in range(entry.first, entry.first + entry.siblings) if each in self.entries]

    def entry(self, group_id: int) -> Entry:
        """Return the entry of an open group. Raises LedgerError if the group is not open."""
        try:
            return self.entries[group_id]
        except KeyError:
            raise LedgerError(f"group {group_id} is not open: it was never admitted, or dropped or committed") from None

    def move(self, entry: Entry, state: GroupState) -> None:
        """Move an entry to another state.

        Raises:
            LedgerError: the transition is not in the diagram above.
        """
        if (entry.state, state) not in _LEGAL:
            raise LedgerError(f"group {entry.group_id} cannot go from {entry.state.value} to {state.value}")
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    def drop(self, entry: Entry, reason: DropReason) -> None:
        """Drop a group. Raises LedgerError if it was trained already."""
        if entry.trained:
            raise LedgerError(f"group {entry.group_id} was trained {entry.trained} times; it cannot be dropped")
        self.counts[entry.state] -= 1
        self.dropped[reason] += 1
        self._forget(entry)

    def commit(self, entry: Entry) -> None:
        """Forget a trained group; it is still counted as trained."""
        if entry.state is not GroupState.TRAINED:
            raise LedgerError(f"group {entry.group_id} is {entry.state.value}, not trained; it cannot be committed")
        self.committed += 1
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.group_id]
        self.sizes[entry.siblings] -= 1

    def all_of(self, siblings: int) -> bool:
        """Whether every open entry was begun with this number of siblings."""
        return self.sizes[siblings] == len(self.entries)

    def check(self, *, in_flight: int, inserted: int, leased: int, trained: int) -> None:
        """Check the conservation law against the sizes of the structures that hold the groups.

        Raises:
            LedgerError: a count differs from the size of its structure, or the sum is not `admitted`.
        """
        counts = self.counts
        held = (in_flight, inserted, leased, trained + self.committed)
        counted = (
            counts[GroupState.IN_FLIGHT],
            counts[GroupState.INSERTED],
            counts[GroupState.LEASED],
            counts[GroupState.TRAINED],
        )
        if held != counted or sum(held) + sum(self.dropped.values()) != self.admitted:
            raise LedgerError(
                f"conservation broken: admitted {self.admitted}, counted (in_flight, inserted, leased, trained) "
                f"{counted}, held {held}, dropped {self.dropped_by_name()}"
            )

    def dropped_by_name(self) -> dict[str, int]:
        return {reason.value: count for reason, count in self.dropped.items() if count}
