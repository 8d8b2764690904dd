"""The books of `asyncrl audit`, kept event by event and by other means than `ReplayState`: a bug there, or a journal
that was tampered with, breaks a rule here. Nothing is raised; violations are collected with the position of the event.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.replay.audit.books import Books, Group, Step
from asyncrl.replay.core.durable import events as ev
from asyncrl.types import NO_VERSION, GroupHeader, StalePolicy


class Auditor(Books):
    """Call `watch` with every event, then `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._oldest = 0
        """No group below this id is open; found anew after a restore."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Snapshotted: self.take_over,
            ev.Configured: self.configure,
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
        self.position = position
        self.events += 1
        handler = self._handlers.get(type(event))
        if handler is not None:  # what is said about peers moves no group
            handler(event)

    # ---- versions

    def _published(self, event: ev.Published) -> None:
        self._publish(event.policy_version, event.parent, length=0)

    def _publish(self, version: int, parent: int, length: int) -> None:
        problem = self.tree.add(version, parent, length, self.again and length == 0)
        self.rule(not problem, problem)
        self.version = version

    # ---- rollouts

    def _begun(self, event: ev.Begun) -> None:
        last = event.first + event.members
        self.rule(event.first >= self.next_id, f"group {event.first} was admitted before")
        self.next_id = max(self.next_id, last)
        for member in range(event.first, last):
            self.admitted += 1
            group = self.groups[member] = Group(prompt_index=event.prompt_index, attempt=-1, held=False)
            group.first, group.siblings = event.first, event.members

    def _issued(self, event: ev.Issued) -> None:
        group = self.groups.get(event.group_id)
        self.rule(event.served_version in self.tree, f"group {event.group_id} was assigned to a worker without weights")
        if group is None:
            self.rule(event.group_id >= self.next_id, f"group {event.group_id} was admitted before")
            self.next_id = max(self.next_id, event.group_id + 1)
            self.admitted += 1
            self.groups[event.group_id] = Group(prompt_index=event.prompt_index, attempt=event.attempt)
            return
        free = group.state == "in_flight" and not group.held
        self.rule(free, f"group {event.group_id} is assigned again, but it is {self._place(group)}")
        self.rule(
            event.attempt > group.attempt,
            f"group {event.group_id} is assigned as attempt {event.attempt} a second time",
        )
        self.rule(event.prompt_index == group.prompt_index, f"group {event.group_id} changed its prompt")
        group.attempt, group.held = event.attempt, True

    def _place(self, group: Group) -> str:
        return "held by a worker" if group.state == "in_flight" and group.held else group.state

    def _returned(self, event: ev.Returned) -> None:
        group = self.group(event.group_id, "given back", "in_flight")
        if group is not None:
            self.rule(group.held, f"group {event.group_id} is returned, but no worker held it")
            group.held = False
            self.lost_attempts += 1

    def _inserted(self, event: ev.Inserted) -> None:
        header = event.header
        group = self.group(header.group_id, "inserted", "in_flight")
        if group is None:
            return
        self.rule(group.held, f"group {header.group_id} is inserted, but no worker held it")
        expected = (group.prompt_index, group.attempt)
        came = (header.prompt_index, header.attempt)
        self.rule(came == expected, f"group {header.group_id} is inserted as (prompt, attempt) {came}, not {expected}")
        for version in _versions([header]):
            self.rule(
                version in self.tree,
                f"group {header.group_id} has tokens of version {version}, which was never published",
            )
        members = header.members
        most = self.settings.get("group_size", members)
        fewest = self.settings.get("min_group_size", 0) or most
        fewest, most = (1, 1) if group.siblings else (fewest, most)
        self.rule(fewest <= members <= most, f"group {header.group_id} is split: {members}")
        group.state, group.held, group.header = "inserted", False, header

    def _drop(self, event: ev.Dropped) -> None:
        group = self.group(event.group_id, "dropped", "in_flight", "inserted", "leased")
        if group is None:
            return
        if group.state == "in_flight":
            self.lost_attempts += group.held
        self.dropped[event.reason.value] += 1
        if group.tokens:
            self.wasted[f"dropped_{event.reason.value}"] += group.tokens
        self.rule(not self.was_trained(group), f"group {event.group_id} is dropped, but it was trained")
        self.unplan(event.group_id, group)
        del self.groups[event.group_id]

    # ---- steps

    def _sealed(self, event: ev.Sealed) -> None:
        right = event.step == self.trained_steps + event.ahead and event.policy_version == self.version
        self.rule(right, f"step {event.step} is sealed {event.ahead} ahead of step {self.trained_steps}")
        same = self.bound in (None, event.max_staleness)
        self.rule(
            same, f"step {event.step} is sealed with a staleness bound of {event.max_staleness}, not {self.bound}"
        )
        held = len({self._whose(member) for member in event.members})
        size = self.settings.get("groups_per_step", held)
        self.rule(held == size, f"step {event.step} has {held} groups, not {size}")
        self._whole(event)
        self.rule(len(set(event.members)) == len(event.members), f"step {event.step} contains a group twice")
        planned = self.steps.get(event.step)
        self.rule(planned is None, f"step {event.step} is sealed again, but its plan is fixed")
        for group_id in event.members:
            group = self.group(group_id, f"sealed into step {event.step}", "inserted")
            if group is not None:
                free = group.before + len(group.steps) < self.uses
                self.rule(free, f"group {group_id} is in step {group.steps} and in step {event.step}")
                group.steps.append(event.step)
                group.state = "leased"
        for _, members in itertools.groupby(event.members, key=self._whose):
            self._gate(list(members), event)
        self.steps[event.step] = Step(members=event.members, version=event.policy_version, ahead=event.ahead)
        self._window(event)

    def _whose(self, member: int) -> int:
        group = self.groups.get(member)
        return group.first if group is not None and group.siblings else member

    def _whole(self, event: ev.Sealed) -> None:
        """No member of a group that was admitted by sample is left behind, and enough of them are there."""
        size = self.settings.get("group_size", 1)
        may_lack = size - (self.settings.get("min_group_size", 0) or size)
        there = [self.groups[member] for member in event.members if member in self.groups]
        for first, begun in {(group.first, group.siblings) for group in there if group.siblings}:
            open_ = [member for member in range(first, first + begun) if member in self.groups]
            left = [member for member in open_ if member not in event.members]
            self.rule(not left, f"step {event.step} has group {first} without its members {left[:5]}")
            lost = begun - len(open_)
            self.rule(lost <= may_lack, f"step {event.step} has group {first}, which lacks {lost} of {begun} members")

    def _window(self, event: ev.Sealed) -> None:
        """Windowed FIFO: no group of the step came from beyond the window of the oldest one that it left behind."""
        window = self.settings.get("window", 0)
        if not window:
            return
        while self._oldest < self.next_id:
            group = self.groups.get(self._oldest)
            if group is not None and group.state in ("in_flight", "inserted"):
                break
            self._oldest += 1
        beyond = [group_id for group_id in event.members if group_id >= self._oldest + window]
        text = (
            f"step {event.step} has groups {beyond[:5]}, which are beyond the window of {window} groups from "
            f"group {self._oldest} on"
        )
        self.rule(not beyond, text)

    def _gate(self, members: list[int], event: ev.Sealed) -> None:
        """The consumption gate, judged again, of all that is one group. What is unknown is a violation already, where
        it was inserted."""
        there = [self.groups[member] for member in members if member in self.groups]
        headers = [group.header for group in there if group.header is not None]
        known = [v for v in _versions(headers) if v in self.tree]
        if self.bound is None or not known or self.version not in self.tree:
            return
        ages = [self.tree.distance(version, self.version, event.ahead) for version in known]
        judged = max(ages) if self.settings.get("stale_policy") == StalePolicy.DROP.value else min(ages)
        fresh = judged <= self.bound
        self.rule(fresh, f"group {members[0]} is in step {event.step} with tokens of staleness {judged} over the bound")

    def _trained(self, event: ev.Trained) -> None:
        self.rule(event.step == self.trained_steps, f"step {event.step} is trained, but {self.trained_steps} is next")
        step = self.steps.get(event.step)
        if self.rule(step is not None and not step.trained, f"step {event.step} is trained, but has no batch") and step:
            self._judge(event.step, step)
            step.trained = True
            for group_id in step.members:
                group = self.group(group_id, f"trained in step {event.step}", "leased")
                if group is not None and all(self.steps[number].trained for number in group.steps):
                    group.state = "trained"
        self._publish(event.policy_version, self.version, length=1)
        self.trained_steps = event.step + 1

    def _reused(self, event: ev.Reused) -> None:
        for group_id in event.groups:
            group = self.group(group_id, "used again", "trained")
            if group is not None:
                more = group.before + len(group.steps) < self.uses
                self.rule(more, f"group {group_id} is used again after steps {group.steps}")
                group.state = "inserted"

    def _retired(self, event: ev.Retired) -> None:
        group = self.group(event.group_id, "retired", "inserted", "leased")
        if group is not None:
            self.rule(self.was_trained(group), f"group {event.group_id} is retired, but it was never trained")
            self.unplan(event.group_id, group)
            group.state, group.retired = "trained", True

    def _judge(self, number: int, step: Step) -> None:
        """Staleness at this moment, against what the batch was sealed for."""
        headers = [group.header for g in step.members if (group := self.groups.get(g)) and group.header]
        for version in _versions(headers):
            if any(each not in self.tree for each in (version, self.version, step.version)):
                continue  # a violation already, where it was inserted or published
            age = self.tree.distance(version, self.version)
            planned = self.tree.distance(version, step.version, step.ahead)
            over = self.bound is not None and planned <= self.bound < age
            self.rule(not over, f"step {number} trains tokens of staleness {age} over the bound {self.bound}")
            tokens = sum(n for h in headers for t in h.trajectories for v, n in t.version_tokens if v == version)
            step.ages[age] += tokens

    def _evicted(self, event: ev.Evicted) -> None:
        step = self.steps.get(event.step)
        if self.rule(step is not None and step.trained, f"step {event.step} is evicted, but was not trained") and step:
            step.evicted = True

    def _committed(self, event: ev.Committed) -> None:
        self.rule(event.step < self.trained_steps, f"step {event.step} is committed, but was not trained")
        for number in range(self.committed_step + 1, event.step + 1):
            if number in self.steps:
                self.steps[number].committed = True
        self.committed_step = max(self.committed_step, event.step)

    # ---- the learner goes back

    def _reloaded(self, event: ev.Reloaded) -> None:
        self._oldest = 0
        self.reload(event)

    def _restored(self, event: ev.Restored) -> None:
        self._oldest = 0
        inside = self.committed_step <= event.step < max(self.trained_steps, 1)
        self.rule(inside, f"the learner goes back to step {event.step}, but step {self.committed_step} is committed")
        undone = [number for number, step in self.steps.items() if step.trained and number > event.step]
        self.rollbacks += bool(undone)
        before: dict[int, str] = {}
        self.again = event.again
        for number in undone:
            self._undo(number, self.steps[number], before)
        if not event.again:
            self._dissolve(before)
        for group_id, state in before.items():
            self._put_back(self.groups[group_id], state)
        self.trained_steps = event.step + 1
        self.version = event.policy_version if event.policy_version in self.tree else NO_VERSION
        self.finished = False

    def _undo(self, number: int, step: Step, before: dict[int, str]) -> None:
        """`before` collects the states of its groups."""
        self.wasted["rolled_back"] += sum(step.ages.values())
        for group_id in step.members:
            group = self.group(group_id, f"taken out of step {number}", "trained", "inserted", "leased")
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
            del self.steps[number]

    def _dissolve(self, before: dict[int, str]) -> None:
        """A branch begins: what was planned is chosen anew."""
        for number in [number for number, step in self.steps.items() if not step.trained]:
            for group_id in self.steps.pop(number).members:
                group = self.groups.get(group_id)
                if group is not None and number in group.steps:
                    before.setdefault(group_id, "leased")
                    group.steps.remove(number)

    def _put_back(self, group: Group, before: str) -> None:
        if any(not self.steps[number].trained for number in group.steps):
            group.state = "leased"
        elif self.was_trained(group):
            group.state = "trained"
        elif before == "trained":  # its payload is gone: it is made again
            group.state, group.header = "in_flight", None
        else:
            group.state = "inserted"

    def _finished(self, event: ev.Finished) -> None:
        left = [group_id for group_id, group in self.groups.items() if group.state != "trained"]
        self.rule(not left, f"the run is finished, but groups {left[:5]} are still open")
        self.finished = True


def _versions(headers: Iterable[GroupHeader]) -> list[int]:
    return sorted({version for header in headers for version in header.versions})
