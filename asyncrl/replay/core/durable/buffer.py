"""Stores groups: those waiting to be sealed, in order, and the sealed steps with their payloads until commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.types import StepPlan


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A sealed batch."""

    step: int
    members: list[Entry]
    plan: StepPlan
    evicted: bool = False


class InJournal:
    """Placeholder for a payload that was released to free memory and is read from the journal when needed."""


IN_JOURNAL = InJournal()


@dataclass(slots=True)
class Buffer:
    """Payload bytes are held from insert until drop, or until the commit of the last step that the group was in.

    A group is in one of three places: `waiting` to be sealed, `leased` while a sealed step that contains it is still to
    be trained, `done` once it was trained and is not to be used again.
    """

    waiting: dict[int, Entry] = field(default_factory=dict)
    """In order of insertion; a group that is used again goes to the end."""
    leased: dict[int, Entry] = field(default_factory=dict)
    done: dict[int, Entry] = field(default_factory=dict)
    untrained: dict[int, Step] = field(default_factory=dict)
    trained: dict[int, Step] = field(default_factory=dict)
    """Trained, not yet committed."""
    nbytes: int = 0

    def put(self, entry: Entry) -> None:
        self.waiting[entry.group_id] = entry
        self.nbytes += entry.header.nbytes if entry.header else 0

    def stand_last(self, first: int, siblings: int) -> None:
        """Move the waiting entries among these ids to the end: a group is ordered by the time when it became whole, and
        this one became whole by losing a member."""
        for group_id in range(first, first + siblings):
            entry = self.waiting.pop(group_id, None)
            if entry is not None:
                self.waiting[group_id] = entry

    def forget(self, entry: Entry) -> None:
        """Remove a group that was never trained, wherever it is."""
        self._take_out(entry)
        self._free(entry)

    def seal(self, step: int, members: Iterable[Entry], plan: StepPlan) -> None:
        sealed = Step(step=step, members=list(members), plan=plan)
        for entry in sealed.members:
            self.leased[entry.group_id] = self.waiting.pop(entry.group_id)
            entry.planned = [step]
        self.untrained[step] = sealed

    def train(self, step: int) -> Step:
        sealed = self.untrained.pop(step)
        self.trained[step] = sealed
        for entry in sealed.members:
            entry.planned.remove(step)
            entry.kept.append(step)
            entry.trained += 1
            if not entry.planned:
                self.done[entry.group_id] = self.leased.pop(entry.group_id)
        return sealed

    def reuse(self, entry: Entry) -> None:
        """Move a group from `done` back to `waiting`."""
        self.waiting[entry.group_id] = self.done.pop(entry.group_id)

    def retire(self, entry: Entry) -> bool:
        """Stop using a trained group. Returns True if no uncommitted step needs it: it is then forgotten."""
        self._take_out(entry)
        if all(self.trained[step].evicted for step in entry.kept):
            self._free(entry)
        if entry.kept:
            self.done[entry.group_id] = entry
        return not entry.kept

    def evict(self, step: int) -> None:
        """Release the payloads of a trained step that no other step needs."""
        self.trained[step].evicted = True
        for entry in self.trained[step].members:
            if entry.group_id in self.done and all(self.trained[kept].evicted for kept in entry.kept):
                self._free(entry)

    def commit(self, step: int) -> list[Entry]:
        """Forget a trained step. Returns those of its members that are no longer needed."""
        over: list[Entry] = []
        for entry in self.trained.pop(step).members:
            entry.kept.remove(step)
            if entry.group_id in self.done and not entry.kept:
                del self.done[entry.group_id]
                self._free(entry)
                over.append(entry)
        return over

    def restore(self, step: int, *, again: bool) -> list[Entry]:
        """Undo training after `step`. Returns the groups that this moved, each once, in order; those without a payload
        have to be generated again, unless they were trained before `step` too.

        Args:
            again: keep the batches as they were planned. Otherwise their groups wait to be chosen again, before all
                others.
        """
        moved: dict[int, Entry] = {}
        for number in sorted(number for number in self.trained if number > step):
            sealed = self.trained.pop(number)
            for entry in sealed.members:
                moved[entry.group_id] = entry
                entry.kept.remove(number)
                entry.trained -= 1
                if not sealed.evicted:
                    entry.planned = sorted([*entry.planned, number])
            if not sealed.evicted:
                self.untrained[number] = sealed
        self.untrained = dict(sorted(self.untrained.items()))
        if not again:
            for sealed in self.untrained.values():
                for entry in sealed.members:
                    moved[entry.group_id] = entry
                    entry.planned = []
            self.untrained = {}
        waited, self.waiting = self.waiting, {}
        for entry in moved.values():
            waited.pop(entry.group_id, None)
            self._place(entry)
        self.waiting |= waited
        return list(moved.values())

    def spill(self, step: Step) -> None:
        """Release the payloads of a sealed step; the journal has them."""
        for entry in step.members:
            if _is_here(entry):
                self._free(entry)
                entry.payload = IN_JOURNAL

    def bring_back(self, entry: Entry, payload: object) -> None:
        """Put back the payload of a group that `spill` released."""
        entry.payload = payload
        self.nbytes += entry.header.nbytes if entry.header else 0

    def within(self, first: int, last: int) -> list[list[Entry]]:
        """The members of the sealed, untrained steps `first` to `last`, inclusive."""
        return [sealed.members for step, sealed in self.untrained.items() if first <= step <= last]

    def _take_out(self, entry: Entry) -> None:
        self.waiting.pop(entry.group_id, None)
        self.leased.pop(entry.group_id, None)
        for step in entry.planned:
            self.untrained[step].members.remove(entry)
        entry.planned = []

    def _place(self, entry: Entry) -> None:
        """Move a group to the place where it belongs after some of its training was undone."""
        for place in (self.waiting, self.leased, self.done):
            place.pop(entry.group_id, None)
        if entry.planned:
            self.leased[entry.group_id] = entry
        elif entry.kept:
            self.done[entry.group_id] = entry
        elif entry.trained:
            self._free(entry)
        elif entry.payload is not None:
            self.waiting[entry.group_id] = entry

    def _free(self, entry: Entry) -> None:
        if _is_here(entry) and entry.header is not None:
            self.nbytes -= entry.header.nbytes
        entry.payload = None


def _is_here(entry: Entry) -> bool:
    """Whether its payload is in memory."""
    return entry.payload is not None and entry.payload is not IN_JOURNAL
