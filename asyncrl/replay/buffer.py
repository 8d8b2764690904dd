"""Stored groups: those waiting to be sealed, in order, and the sealed steps with their payloads until commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.replay.ledger import Entry
from asyncrl.types import StepPlan

Selector = Callable[[Sequence[Entry], Callable[[Entry], int]], list[Entry]]
"""`selector(waiting, slack)`: the waiting groups in the order they should be trained."""


def oldest_first(waiting: Sequence[Entry], slack: Callable[[Entry], int]) -> list[Entry]:
    """First in, first out."""
    return list(waiting)


def most_urgent_first(waiting: Sequence[Entry], slack: Callable[[Entry], int]) -> list[Entry]:
    """By how many steps a group can still wait; first in, first out among equals. What policy `wait` relies on."""
    return sorted(waiting, key=slack)


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A sealed batch. After a restore `plan` is None: the members stand, their staleness is judged again."""

    step: int
    members: list[Entry]
    plan: StepPlan | None = None
    evicted: bool = False


@dataclass(slots=True)
class Buffer:
    """Payload bytes are held from insert until commit or drop."""

    waiting: dict[int, Entry] = field(default_factory=dict)
    """Inserted groups by id, in order of insertion."""
    untrained: dict[int, Step] = field(default_factory=dict)
    trained: dict[int, Step] = field(default_factory=dict)
    """Trained, not yet committed."""
    nbytes: int = 0
    leased: int = 0
    trained_groups: int = 0

    def put(self, entry: Entry) -> None:
        self.waiting[entry.group_id] = entry
        self.nbytes += entry.header.nbytes if entry.header else 0

    def forget(self, entry: Entry) -> None:
        """Give up the payload of a group, wherever it is."""
        if self.waiting.pop(entry.group_id, None) is None and entry.step in self.untrained:
            self.untrained[entry.step].members.remove(entry)
            self.leased -= 1
        self._free(entry)

    def seal(self, step: int, members: Iterable[Entry], plan: StepPlan) -> None:
        """Members are waiting, or already in this step (planned before a restore)."""
        before = self.untrained.pop(step, None)
        self.leased -= len(before.members) if before else 0
        sealed = Step(step=step, members=list(members), plan=plan)
        for entry in sealed.members:
            self.waiting.pop(entry.group_id, None)
        self.untrained[step] = sealed
        self.leased += len(sealed.members)

    def train(self, step: int) -> Step:
        sealed = self.untrained.pop(step)
        self.trained[step] = sealed
        self.leased -= len(sealed.members)
        self.trained_groups += len(sealed.members)
        return sealed

    def evict(self, step: int) -> None:
        """Give up the payloads of a trained step."""
        self.trained[step].evicted = True
        for entry in self.trained[step].members:
            self._free(entry)

    def commit(self, step: int) -> list[Entry]:
        """Forget a trained step; returns its members."""
        sealed = self.trained.pop(step)
        self.trained_groups -= len(sealed.members)
        for entry in sealed.members:
            self._free(entry)
        return sealed.members

    def restore(self, step: int) -> list[Entry]:
        """Undo training after `step`. Returns the members of evicted steps: they have to be made again."""
        lost: list[Entry] = []
        for number in sorted(number for number in self.trained if number > step):
            sealed = self.trained.pop(number)
            self.trained_groups -= len(sealed.members)
            if sealed.evicted:
                lost.extend(sealed.members)
            else:
                self.untrained[number] = sealed
                self.leased += len(sealed.members)
        for sealed in self.untrained.values():
            sealed.plan = None
        return lost

    def within(self, first: int, last: int) -> int:
        """Groups sealed for the steps `first` to `last`."""
        return sum(len(sealed.members) for step, sealed in self.untrained.items() if first <= step <= last)

    def _free(self, entry: Entry) -> None:
        if entry.payload is not None and entry.header is not None:
            self.nbytes -= entry.header.nbytes
            entry.payload = None
