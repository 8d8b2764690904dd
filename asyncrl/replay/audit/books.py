"""What the auditor keeps of a run, and what it takes over from a snapshot: the groups, the steps, the versions, and the
rules that were broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.replay.audit.lineage import Lineage
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.types import NO_VERSION, GroupHeader

KEPT_VIOLATIONS = 20
"""Told in full; all are counted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group that was not dropped. Trained groups stay, so that training on one a second time is noticed."""

    prompt_index: int
    attempt: int
    state: str = "in_flight"
    """`in_flight`, `inserted`, `leased` or `trained`."""
    held: bool = True
    """Whether a worker has it while it is in flight. False: it waits to be issued again."""
    steps: list[int] = field(default_factory=list)
    """Steps for which it is planned or in which it was trained, in the surviving history."""
    before: int = 0
    """Number of steps in which it was trained before the journal begins."""
    retired: bool = False
    """It was trained, waited for another step, and is no longer used: over-age, or the run is over."""
    header: GroupHeader | None = None
    first: int = -1
    """For a member of a group admitted by sample, the id of the group's first member; -1 for a whole group."""
    siblings: int = 0
    """Number of members with which that group was started."""

    @property
    def tokens(self) -> int:
        return sum(trajectory.loss_tokens for trajectory in self.header.trajectories) if self.header else 0


@dataclass(slots=True, kw_only=True)
class Step:
    members: tuple[int, ...]
    version: int
    """The learner's policy version at sealing."""
    ahead: int
    trained: bool = False
    evicted: bool = False
    committed: bool = False
    ages: Counter[int] = field(default_factory=Counter)
    """Staleness at training -> number of loss tokens, including over-age ones."""


class Books:
    """Written by the auditor alone; read by the report."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        self.from_start = True
        self.on_trust_from: int | None = None
        """Trained steps of a checkpoint that told what this journal never saw; None: there was no such one."""
        self.finished = False
        self.events = 0
        self.admitted = 0
        self.groups: dict[int, Group] = {}
        self.steps: dict[int, Step] = {}
        self.tree = Lineage()
        self.trained_steps = 0
        self.committed_step = -1
        self.rollbacks = 0
        self.lost_attempts = 0
        self.dropped: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.violations: list[str] = []
        self.violation_count = 0
        self._before: Counter[str] = Counter()
        """Groups by state that the snapshot at the journal's beginning counts without naming them."""
        self.version = NO_VERSION
        self.again = False
        """The learner walks a part of the newest lineage once more."""
        self.next_id = 0
        self.position = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The admission settings, as far as the journal names them."""
        return self.run.get("settings", {})

    @property
    def uses(self) -> int:
        """Steps that a group may be trained in."""
        return self.settings.get("max_times_sampled", 1)

    @property
    def bound(self) -> int | None:
        return self.settings.get("max_staleness")

    def counts(self) -> Counter[str]:
        """Groups by state, dropped ones not among them."""
        return self._before + Counter(group.state for group in self.groups.values())

    def uses_of_trained(self) -> Counter[tuple[int, bool]]:
        """(Steps that it was trained in, whether it was retired) -> groups that will be trained no more, as far as they
        are named."""
        over = [group for group in self.groups.values() if group.state == "trained"]
        return Counter((group.before + len(group.steps), group.retired) for group in over)

    def close(self) -> None:
        """The conservation law over the whole history."""
        held = sum(self.counts().values()) + sum(self.dropped.values())
        self.rule(held == self.admitted, f"{self.admitted} groups were admitted, but {held} are accounted for")

    def rule(self, holds: bool, text: str) -> bool:
        if not holds:
            self.violation_count += 1
            if len(self.violations) < KEPT_VIOLATIONS:
                self.violations.append(f"position {self.position}: {text}")
        return holds

    def group(self, group_id: int, what: str, *states: str) -> Group | None:
        """The group, if it is in one of `states`; else a violation."""
        group = self.groups.get(group_id)
        if group is None:
            self.rule(False, f"group {group_id} is {what}, but it is not open")
        elif not self.rule(group.state in states, f"group {group_id} is {what}, but it is {group.state}"):
            group = None
        return group

    def was_trained(self, group: Group) -> bool:
        return group.before > 0 or any(self.steps[number].trained for number in group.steps)

    def unplan(self, group_id: int, group: Group) -> None:
        """Take it out of the steps that are to be trained."""
        planned = [number for number in group.steps if not self.steps[number].trained]
        for number in planned:
            step = self.steps[number]
            step.members = tuple(member for member in step.members if member != group_id)
        group.steps = [number for number in group.steps if number not in planned]

    def take_over(self, event: ev.Snapshotted) -> None:
        """The journal's first record: what was before it is taken over."""
        if self.events > 1:
            return
        self.run, self.from_start = event.run, event.previous_end < 0
        state = ReplayState()
        state.load(event.image)
        ledger = state.ledger
        for entry in ledger.entries.values():
            held = entry.group_id in state.held
            group = Group(prompt_index=entry.prompt_index, attempt=entry.attempt, state=entry.state.value, held=held)
            group.steps, group.header = [*entry.kept, *entry.planned], entry.header
            group.before = entry.trained - len(entry.kept)
            group.first, group.siblings = entry.first, entry.siblings
            self.groups[entry.group_id] = group
        for trained, steps in ((False, state.buffer.untrained), (True, state.buffer.trained)):
            for number, sealed in steps.items():
                members = tuple(entry.group_id for entry in sealed.members)
                version = sealed.plan.policy_version
                self.steps[number] = Step(
                    members=members, version=version, ahead=0, trained=trained, evicted=sealed.evicted
                )
        self._before["trained"] = ledger.committed
        self.admitted = ledger.admitted
        self.dropped = Counter({reason.value: count for reason, count in ledger.dropped.items() if count})
        self._adopt_tree(state.tree.snapshot())
        self.version, self.next_id, self.finished = state.version, state.next_group_id, state.finished
        self.again = state.again
        self.trained_steps, self.committed_step = state.trained_steps, state.committed_step

    def configure(self, event: ev.Configured) -> None:
        """In force for what follows; what was judged before was judged by the settings of its time."""
        self.run = {**self.run, "settings": event.settings}

    def reload(self, event: ev.Reloaded) -> None:
        """The server forgot; the checkpoint's own account of the history up to it counts from here."""
        snapshot = event.snapshot
        self.rollbacks += 1
        if snapshot["step"] >= self.trained_steps:
            self.on_trust_from = snapshot["step"] + 1
        kept = {number: step for number, step in self.steps.items() if step.trained and number <= snapshot["step"]}
        trained = {g for step in kept.values() for g in step.members}
        named = {g: group for g, group in self.groups.items() if g in trained}
        for group in named.values():
            group.state, group.steps = "trained", [number for number in group.steps if number in kept]
        self.steps, self.groups = kept, named
        self._before = Counter({"trained": snapshot["trained"] - len(named)})
        members = {group_id: row for group_id, *row in snapshot["siblings"]}
        for group_id, prompt_index, attempt, *_ in snapshot["open"]:
            group = self.groups[group_id] = Group(prompt_index=prompt_index, attempt=attempt, held=False)
            group.first, group.siblings = members.get(group_id, (-1, 0))
            self.next_id = max(self.next_id, group_id + 1)
        self.dropped = Counter({name: count for name, count in snapshot["dropped"].items() if count})
        self.admitted = sum(self.counts().values()) + sum(self.dropped.values())
        self.next_id = max(self.next_id, snapshot["next_group_id"])
        self._adopt_tree(snapshot["tree"])
        self.trained_steps, self.committed_step = snapshot["step"] + 1, snapshot["step"]

    def _adopt_tree(self, rows: Iterable[list[int]]) -> None:
        """`[[version, parent, length, again], ..., [newest]]`: irregular versions, the others are children of their
        predecessor."""
        *edges, (newest,) = rows
        if newest <= self.tree.newest:
            return
        self.tree = Lineage()
        irregular = {version: (parent, length, bool(again)) for version, parent, length, again in edges}
        for version in range(min(irregular, default=0), newest + 1):
            problem = self.tree.add(version, *irregular.get(version, (version - 1, 1, False)))
            self.rule(not problem, problem)
