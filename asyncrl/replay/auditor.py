"""The books of `asyncrl audit`, kept event by event and by other means than `ReplayState`: a bug there, or a journal
that was tampered with, breaks a rule here. Nothing is raised; violations are collected with the position of the event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.replay import events as ev
from asyncrl.replay.accounts import Group, Step
from asyncrl.replay.books import Books
from asyncrl.types import NO_VERSION, GroupHeader


class Auditor(Books):
    """Attributes are for reading. Call `watch` with every event, then `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Snapshotted: self._snapshotted,
            ev.Published: self._published,
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
        self._position = position
        self.events += 1
        handler = self._handlers.get(type(event))
        if handler is not None:  # what is said about peers moves no group
            handler(event)

    # ---- versions

    def _published(self, event: ev.Published) -> None:
        self._publish(event.policy_version, event.parent, length=0)

    def _publish(self, version: int, parent: int, length: int) -> None:
        problem = self.tree.add(version, parent, length)
        self._rule(not problem, problem)
        self._version = version

    # ---- rollouts

    def _issued(self, event: ev.Issued) -> None:
        group = self.groups.get(event.group_id)
        self._rule(event.served_version in self.tree, f"group {event.group_id} was given to a worker without weights")
        if group is None:
            self._rule(event.group_id >= self._next_id, f"group {event.group_id} was admitted before")
            self._next_id = max(self._next_id, event.group_id + 1)
            self.admitted += 1
            self.groups[event.group_id] = Group(prompt_index=event.prompt_index, attempt=event.attempt)
            return
        free = group.state == "in_flight" and not group.held
        self._rule(free, f"group {event.group_id} is issued again, but it is {self._place(group)}")
        self._rule(event.attempt > group.attempt, f"group {event.group_id} is issued as attempt {event.attempt} again")
        self._rule(event.prompt_index == group.prompt_index, f"group {event.group_id} changed its prompt")
        group.attempt, group.held = event.attempt, True

    def _place(self, group: Group) -> str:
        return "held by a worker" if group.state == "in_flight" and group.held else group.state

    def _returned(self, event: ev.Returned) -> None:
        group = self._group(event.group_id, "given back", "in_flight")
        if group is not None:
            self._rule(group.held, f"group {event.group_id} is given back, but no worker held it")
            group.held = False
            self.lost_attempts += 1

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
                version in self.tree, f"group {header.group_id} has tokens of version {version}, never published"
            )
        members = len(header.trajectories)
        most = self.settings.get("group_size", members)
        fewest = self.settings.get("min_group_size", 0) or most
        self._rule(fewest <= members <= most, f"group {header.group_id} is split: {members}")
        group.state, group.held, group.header = "inserted", False, header

    def _drop(self, event: ev.Dropped) -> None:
        group = self._group(event.group_id, "dropped", "in_flight", "inserted", "leased")
        if group is None:
            return
        if group.state == "in_flight":
            self.lost_attempts += group.held
        self.dropped[event.reason.value] += 1
        if group.tokens:
            self.wasted[f"dropped_{event.reason.value}"] += group.tokens
        self._rule(not self._was_trained(group), f"group {event.group_id} is dropped, but it was trained")
        self._unplan(event.group_id, group)
        del self.groups[event.group_id]

    # ---- steps

    def _sealed(self, event: ev.Sealed) -> None:
        right = event.step == self.trained_steps + event.ahead and event.policy_version == self._version
        self._rule(right, f"step {event.step} is sealed {event.ahead} ahead of step {self.trained_steps}")
        size = self.settings.get("groups_per_step", len(event.members))
        self._rule(len(event.members) == size, f"step {event.step} has {len(event.members)} groups, not {size}")
        self._rule(len(set(event.members)) == len(event.members), f"step {event.step} has a group twice")
        planned = self.steps.get(event.step)
        missing = set(planned.members) - set(event.members) if planned and not planned.trained else set()
        self._rule(not missing, f"step {event.step} is sealed again without its groups {sorted(missing)[:5]}")
        for group_id in event.members:
            group = self._group(group_id, f"sealed into step {event.step}", "inserted", "leased")
            if group is not None:
                if event.step not in group.steps:
                    free = group.state == "inserted" and group.before + len(group.steps) < self.uses
                    self._rule(free, f"group {group_id} is in step {group.steps} and in step {event.step}")
                    group.steps.append(event.step)
                group.state = "leased"
        self.steps[event.step] = Step(members=event.members, version=event.policy_version, ahead=event.ahead)

    def _trained(self, event: ev.Trained) -> None:
        self._rule(event.step == self.trained_steps, f"step {event.step} is trained, but {self.trained_steps} is next")
        step = self.steps.get(event.step)
        if self._rule(step is not None and not step.trained, f"step {event.step} is trained without a batch") and step:
            self._judge(event.step, step)
            step.trained = True
            for group_id in step.members:
                group = self._group(group_id, f"trained in step {event.step}", "leased")
                if group is not None and all(self.steps[number].trained for number in group.steps):
                    group.state = "trained"
        self._publish(event.policy_version, self._version, length=1)
        self.trained_steps = event.step + 1

    def _reused(self, event: ev.Reused) -> None:
        for group_id in event.groups:
            group = self._group(group_id, "used again", "trained")
            if group is not None:
                more = group.before + len(group.steps) < self.uses
                self._rule(more, f"group {group_id} is used again after the steps {group.steps}")
                group.state = "inserted"

    def _retired(self, event: ev.Retired) -> None:
        group = self._group(event.group_id, "retired", "inserted", "leased")
        if group is not None:
            self._rule(self._was_trained(group), f"group {event.group_id} is retired, but it was never trained")
            self._unplan(event.group_id, group)
            group.state = "trained"

    def _judge(self, number: int, step: Step) -> None:
        """Staleness at this moment, against what the batch was sealed for."""
        headers = [group.header for g in step.members if (group := self.groups.get(g)) and group.header]
        for version in _versions(headers):
            if version not in self.tree or self._version not in self.tree or step.version not in self.tree:
                continue  # a violation already, where it was inserted or published
            age = self.tree.distance(version, self._version)
            planned = self.tree.distance(version, step.version) + step.ahead
            over = self.bound is not None and planned <= self.bound < age
            self._rule(not over, f"step {number} trains tokens of staleness {age} over the bound {self.bound}")
            tokens = sum(n for h in headers for t in h.trajectories for v, n in t.version_tokens if v == version)
            step.ages[age] += tokens

    def _evicted(self, event: ev.Evicted) -> None:
        step = self.steps.get(event.step)
        if self._rule(step is not None and step.trained, f"step {event.step} is evicted, but was not trained") and step:
            step.evicted = True

    def _committed(self, event: ev.Committed) -> None:
        self._rule(event.step < self.trained_steps, f"step {event.step} is committed, but was not trained")
        for number in range(self.committed_step + 1, event.step + 1):
            if number in self.steps:
                self.steps[number].committed = True
        self.committed_step = max(self.committed_step, event.step)

    # ---- the learner goes back

    def _restored(self, event: ev.Restored) -> None:
        inside = self.committed_step <= event.step < max(self.trained_steps, 1)
        self._rule(inside, f"the learner goes back to step {event.step}; {self.committed_step} is committed")
        undone = [number for number, step in self.steps.items() if step.trained and number > event.step]
        self.rollbacks += bool(undone)
        before: dict[int, str] = {}
        for number in undone:
            self._undo(number, self.steps[number], before)
        for group_id, state in before.items():
            self._put_back(self.groups[group_id], state)
        self.trained_steps = event.step + 1
        self._version = event.policy_version if event.policy_version in self.tree else NO_VERSION
        self.finished = False

    def _undo(self, number: int, step: Step, before: dict[int, str]) -> None:
        """`before` collects the states of its groups."""
        self.wasted["rolled_back"] += sum(step.ages.values())
        for group_id in step.members:
            group = self._group(group_id, f"taken out of step {number}", "trained", "inserted", "leased")
            if group is None:
                continue
            before.setdefault(group_id, group.state)
            if step.evicted:
                group.steps.remove(number)
        step.trained = False
        step.ages = Counter()
        if step.evicted:
            del self.steps[number]

    def _put_back(self, group: Group, before: str) -> None:
        if any(not self.steps[number].trained for number in group.steps):
            group.state = "leased"
        elif self._was_trained(group):
            group.state = "trained"
        elif before == "trained":  # its payload is gone: it is made again
            group.state, group.header = "in_flight", None
        else:
            group.state = "inserted"

    def _finished(self, event: ev.Finished) -> None:
        left = [group_id for group_id, group in self.groups.items() if group.state != "trained"]
        self._rule(not left, f"the run is finished, but groups {left[:5]} are open")
        self.finished = True


def _versions(headers: Iterable[GroupHeader]) -> list[int]:
    return sorted({version for header in headers for t in header.trajectories for version, _ in t.version_tokens})
