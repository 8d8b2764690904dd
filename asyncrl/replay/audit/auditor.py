"""The books of `asyncrl audit`, kept event by event and by other means than `ReplayState`: a bug there, or a journal
that was tampered with, breaks a rule here. Nothing is raised; violations are collected with the position of the event.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.replay.audit.accounts import Group, Step
from asyncrl.replay.audit.books import Books
from asyncrl.replay.core.durable import events as ev
from asyncrl.types import NO_VERSION, GroupHeader, StalePolicy


class Auditor:
    """Call `watch` with every event, then `close` the books."""

    def __init__(self) -> None:
        self.books = Books()
        self._rule, self._group = self.books.rule, self.books.group
        self._oldest = 0
        """No group below this id is open; found anew after a restore."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Snapshotted: self.books.take_over,
            ev.Configured: self.books.configure,
            ev.Published: self._published,
            ev.Begun: self._begun,
            ev.Issued: self._issued,
            ev.Returned: self._returned,
            ev.Inserted: self._inserted,
            ev.Dropped: self._drop,
            ev.Sealed: self._sealed,
            ev.Trained: self._trained,
            ev.Reused: self._reused,
            ev.Retired: self._retired,
            ev.Evicted: self._evicted,
            ev.Committed: self._committed,
            ev.Restored: self._restored,
            ev.Reloaded: self._reloaded,
            ev.Finished: self._finished,
        }

    def watch(self, position: int, event: ev.Event) -> None:
        self.books.position = position
        self.books.events += 1
        handler = self._handlers.get(type(event))
        if handler is not None:  # what is said about peers moves no group
            handler(event)

    # ---- versions

    def _published(self, event: ev.Published) -> None:
        self._publish(event.policy_version, event.parent, length=0)

    def _publish(self, version: int, parent: int, length: int) -> None:
        problem = self.books.tree.add(version, parent, length, self.books.again and length == 0)
        self._rule(not problem, problem)
        self.books.version = version

    # ---- rollouts

    def _begun(self, event: ev.Begun) -> None:
        last = event.first + event.members
        self._rule(event.first >= self.books.next_id, f"group {event.first} was admitted before")
        self.books.next_id = max(self.books.next_id, last)
        for member in range(event.first, last):
            self.books.admitted += 1
            group = self.books.groups[member] = Group(prompt_index=event.prompt_index, attempt=-1, held=False)
            group.first, group.siblings = event.first, event.members

    def _issued(self, event: ev.Issued) -> None:
        group = self.books.groups.get(event.group_id)
        self._rule(
            event.served_version in self.books.tree, f"group {event.group_id} was assigned to a worker without weights"
        )
        if group is None:
            self._rule(event.group_id >= self.books.next_id, f"group {event.group_id} was admitted before")
            self.books.next_id = max(self.books.next_id, event.group_id + 1)
            self.books.admitted += 1
            self.books.groups[event.group_id] = Group(prompt_index=event.prompt_index, attempt=event.attempt)
            return
        free = group.state == "in_flight" and not group.held
        self._rule(free, f"group {event.group_id} is assigned again, but it is {self._place(group)}")
        self._rule(
            event.attempt > group.attempt,
            f"group {event.group_id} is assigned as attempt {event.attempt} a second time",
        )
        self._rule(event.prompt_index == group.prompt_index, f"group {event.group_id} changed its prompt")
        group.attempt, group.held = event.attempt, True

    def _place(self, group: Group) -> str:
        return "held by a worker" if group.state == "in_flight" and group.held else group.state

    def _returned(self, event: ev.Returned) -> None:
        group = self._group(event.group_id, "given back", "in_flight")
        if group is not None:
            self._rule(group.held, f"group {event.group_id} is returned, but no worker held it")
            group.held = False
            self.books.lost_attempts += 1

    def _inserted(self, event: ev.Inserted) -> None:
        header = event.header
        group = self._group(header.group_id, "inserted", "in_flight")
        if group is None:
            return
        self._rule(group.held, f"group {header.group_id} is inserted, but no worker held it")
        expected = (group.prompt_index, group.attempt)
        came = (header.prompt_index, header.attempt)
        self._rule(came == expected, f"group {header.group_id} is inserted as (prompt, attempt) {came}, not {expected}")
        for version in _versions([header]):
            self._rule(
                version in self.books.tree,
                f"group {header.group_id} has tokens of version {version}, which was never published",
            )
        members = header.members
        most = self.books.settings.get("group_size", members)
        fewest = self.books.settings.get("min_group_size", 0) or most
        fewest, most = (1, 1) if group.siblings else (fewest, most)
        self._rule(fewest <= members <= most, f"group {header.group_id} is split: {members}")
        group.state, group.held, group.header = "inserted", False, header

    def _drop(self, event: ev.Dropped) -> None:
        group = self._group(event.group_id, "dropped", "in_flight", "inserted", "leased")
        if group is None:
            return
        if group.state == "in_flight":
            self.books.lost_attempts += group.held
        self.books.dropped[event.reason.value] += 1
        if group.tokens:
            self.books.wasted[f"dropped_{event.reason.value}"] += group.tokens
        self._rule(not self.books.was_trained(group), f"group {event.group_id} is dropped, but it was trained")
        self.books.unplan(event.group_id, group)
        del self.books.groups[event.group_id]

    # ---- steps

    def _sealed(self, event: ev.Sealed) -> None:
        right = event.step == self.books.trained_steps + event.ahead and event.policy_version == self.books.version
        self._rule(right, f"step {event.step} is sealed {event.ahead} ahead of step {self.books.trained_steps}")
        same = self.books.bound in (None, event.max_staleness)
        self._rule(
            same, f"step {event.step} is sealed with a staleness bound of {event.max_staleness}, not {self.books.bound}"
        )
        held = len({self._whose(member) for member in event.members})
        size = self.books.settings.get("groups_per_step", held)
        self._rule(held == size, f"step {event.step} has {held} groups, not {size}")
        self._whole(event)
        self._rule(len(set(event.members)) == len(event.members), f"step {event.step} contains a group twice")
        planned = self.books.steps.get(event.step)
        self._rule(planned is None, f"step {event.step} is sealed again, but its plan is fixed")
        for group_id in event.members:
            group = self._group(group_id, f"sealed into step {event.step}", "inserted")
            if group is not None:
                free = group.before + len(group.steps) < self.books.uses
                self._rule(free, f"group {group_id} is in step {group.steps} and in step {event.step}")
                group.steps.append(event.step)
                group.state = "leased"
        for _, members in itertools.groupby(event.members, key=self._whose):
            self._gate(list(members), event)
        self.books.steps[event.step] = Step(members=event.members, version=event.policy_version, ahead=event.ahead)
        self._window(event)

    def _whose(self, member: int) -> int:
        group = self.books.groups.get(member)
        return group.first if group is not None and group.siblings else member

    def _whole(self, event: ev.Sealed) -> None:
        """No member of a group that was admitted by sample is left behind, and enough of them are there."""
        size = self.books.settings.get("group_size", 1)
        may_lack = size - (self.books.settings.get("min_group_size", 0) or size)
        there = [self.books.groups[member] for member in event.members if member in self.books.groups]
        for first, begun in {(group.first, group.siblings) for group in there if group.siblings}:
            open_ = [member for member in range(first, first + begun) if member in self.books.groups]
            left = [member for member in open_ if member not in event.members]
            self._rule(not left, f"step {event.step} has group {first} without its members {left[:5]}")
            lost = begun - len(open_)
            self._rule(lost <= may_lack, f"step {event.step} has group {first}, which lacks {lost} of {begun} members")

    def _window(self, event: ev.Sealed) -> None:
        """Windowed FIFO: no group of the step came from beyond the window of the oldest one that it left behind."""
        window = self.books.settings.get("window", 0)
        if not window:
            return
        while self._oldest < self.books.next_id:
            group = self.books.groups.get(self._oldest)
            if group is not None and group.state in ("in_flight", "inserted"):
                break
            self._oldest += 1
        beyond = [group_id for group_id in event.members if group_id >= self._oldest + window]
        text = (
            f"step {event.step} has groups {beyond[:5]}, which are beyond the window of {window} groups from "
            f"group {self._oldest} on"
        )
        self._rule(not beyond, text)

    def _gate(self, members: list[int], event: ev.Sealed) -> None:
        """The consumption gate, judged again, of all that is one group. What is unknown is a violation already, where
        it was inserted."""
        there = [self.books.groups[member] for member in members if member in self.books.groups]
        headers = [group.header for group in there if group.header is not None]
        known = [v for v in _versions(headers) if v in self.books.tree]
        if self.books.bound is None or not known or self.books.version not in self.books.tree:
            return
        ages = [self.books.tree.distance(version, self.books.version, event.ahead) for version in known]
        judged = max(ages) if self.books.settings.get("stale_policy") == StalePolicy.DROP.value else min(ages)
        fresh = judged <= self.books.bound
        self._rule(
            fresh, f"group {members[0]} is in step {event.step} with tokens of staleness {judged} over the bound"
        )

    def _trained(self, event: ev.Trained) -> None:
        self._rule(
            event.step == self.books.trained_steps,
            f"step {event.step} is trained, but {self.books.trained_steps} is next",
        )
        step = self.books.steps.get(event.step)
        if (
            self._rule(step is not None and not step.trained, f"step {event.step} is trained, but has no batch")
            and step
        ):
            self._judge(event.step, step)
            step.trained = True
            for group_id in step.members:
                group = self._group(group_id, f"trained in step {event.step}", "leased")
                if group is not None and all(self.books.steps[number].trained for number in group.steps):
                    group.state = "trained"
        self._publish(event.policy_version, self.books.version, length=1)
        self.books.trained_steps = event.step + 1

    def _reused(self, event: ev.Reused) -> None:
        for group_id in event.groups:
            group = self._group(group_id, "used again", "trained")
            if group is not None:
                more = group.before + len(group.steps) < self.books.uses
                self._rule(more, f"group {group_id} is used again after steps {group.steps}")
                group.state = "inserted"

    def _retired(self, event: ev.Retired) -> None:
        group = self._group(event.group_id, "retired", "inserted", "leased")
        if group is not None:
            self._rule(self.books.was_trained(group), f"group {event.group_id} is retired, but it was never trained")
            self.books.unplan(event.group_id, group)
            group.state, group.retired = "trained", True

    def _judge(self, number: int, step: Step) -> None:
        """Staleness at this moment, against what the batch was sealed for."""
        headers = [group.header for g in step.members if (group := self.books.groups.get(g)) and group.header]
        for version in _versions(headers):
            if (
                version not in self.books.tree
                or self.books.version not in self.books.tree
                or step.version not in self.books.tree
            ):
                continue  # a violation already, where it was inserted or published
            age = self.books.tree.distance(version, self.books.version)
            planned = self.books.tree.distance(version, step.version, step.ahead)
            over = self.books.bound is not None and planned <= self.books.bound < age
            self._rule(not over, f"step {number} trains tokens of staleness {age} over the bound {self.books.bound}")
            tokens = sum(n for h in headers for t in h.trajectories for v, n in t.version_tokens if v == version)
            step.ages[age] += tokens

    def _evicted(self, event: ev.Evicted) -> None:
        step = self.books.steps.get(event.step)
        if self._rule(step is not None and step.trained, f"step {event.step} is evicted, but was not trained") and step:
            step.evicted = True

    def _committed(self, event: ev.Committed) -> None:
        self._rule(event.step < self.books.trained_steps, f"step {event.step} is committed, but was not trained")
        for number in range(self.books.committed_step + 1, event.step + 1):
            if number in self.books.steps:
                self.books.steps[number].committed = True
        self.books.committed_step = max(self.books.committed_step, event.step)

    # ---- the learner goes back

    def _reloaded(self, event: ev.Reloaded) -> None:
        self._oldest = 0
        self.books.reload(event)

    def _restored(self, event: ev.Restored) -> None:
        self._oldest = 0
        inside = self.books.committed_step <= event.step < max(self.books.trained_steps, 1)
        self._rule(
            inside, f"the learner goes back to step {event.step}, but step {self.books.committed_step} is committed"
        )
        undone = [number for number, step in self.books.steps.items() if step.trained and number > event.step]
        self.books.rollbacks += bool(undone)
        before: dict[int, str] = {}
        self.books.again = event.again
        for number in undone:
            self._undo(number, self.books.steps[number], before)
        if not event.again:
            self._dissolve(before)
        for group_id, state in before.items():
            self._put_back(self.books.groups[group_id], state)
        self.books.trained_steps = event.step + 1
        self.books.version = event.policy_version if event.policy_version in self.books.tree else NO_VERSION
        self.books.finished = False

    def _undo(self, number: int, step: Step, before: dict[int, str]) -> None:
        """`before` collects the states of its groups."""
        self.books.wasted["rolled_back"] += sum(step.ages.values())
        for group_id in step.members:
            group = self._group(group_id, f"taken out of step {number}", "trained", "inserted", "leased")
            if group is None:
                continue
            before.setdefault(group_id, group.state)
            group.retired = False
            if step.evicted:
                group.steps.remove(number)
            else:
                before[group_id] = "inserted"
        step.trained = False
        step.ages = Counter()
        if step.evicted:
            del self.books.steps[number]

    def _dissolve(self, before: dict[int, str]) -> None:
        """A branch begins: what was planned is chosen anew."""
        for number in [number for number, step in self.books.steps.items() if not step.trained]:
            for group_id in self.books.steps.pop(number).members:
                group = self.books.groups.get(group_id)
                if group is not None and number in group.steps:
                    before.setdefault(group_id, "leased")
                    group.steps.remove(number)

    def _put_back(self, group: Group, before: str) -> None:
        if any(not self.books.steps[number].trained for number in group.steps):
            group.state = "leased"
        elif self.books.was_trained(group):
            group.state = "trained"
        elif before == "trained":  # its payload is gone: it is made again
            group.state, group.header = "in_flight", None
        else:
            group.state = "inserted"

    def _finished(self, event: ev.Finished) -> None:
        left = [group_id for group_id, group in self.books.groups.items() if group.state != "trained"]
        self._rule(not left, f"the run is finished, but groups {left[:5]} are still open")
        self.books.finished = True


def _versions(headers: Iterable[GroupHeader]) -> list[int]:
    return sorted({version for header in headers for t in header.trajectories for version, _ in t.version_tokens})
