"""A small reference model of the replay (dictionaries). It applies every event and is compared with the real state."""

from __future__ import annotations

from typing import Any

from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.types import NO_VERSION


class Model:
    def __init__(self) -> None:
        self.groups: dict[int, dict[str, Any]] = {}
        """Group id -> `state`, `prompt`, `attempt`, `step`, `tokens`; open groups and trained, uncommitted ones."""
        self.finals: dict[int, str] = {}
        """Group id -> "committed", or the reason for which the group was dropped."""
        self.steps: dict[int, dict[str, Any]] = {}
        """Step -> `members`, `trained`, `evicted`, of the steps that are sealed and not yet committed."""
        self.places: dict[int, tuple[Any, ...]] = {}
        """Version -> the forks on its line, each with the number of steps trained before it, then the number of steps
        trained before the version itself."""
        self.again = False
        """True while the learner trains the steps of its own line again after a restart."""
        self.version = NO_VERSION
        self.trained_steps, self.committed_step, self.cursor, self.next_id = 0, -1, 0, 0
        self.readmitted: list[int] = []

    def apply(self, event: ev.Event) -> None:
        name = f"_{type(event).__name__.lower()}"
        if hasattr(self, name):
            getattr(self, name)(event)

    def compare(self, state: ReplayState) -> None:
        """Raise AssertionError if the real state differs from the model."""
        real = {
            entry.group_id: {"state": entry.state.value, "prompt": entry.prompt_index, "attempt": entry.attempt}
            for entry in state.ledger.entries.values()
        }
        mine = {g: {k: group[k] for k in ("state", "prompt", "attempt")} for g, group in self.groups.items()}
        assert real == mine, f"{real} != {mine}"
        buffer = state.buffer
        for trained, steps in ((False, buffer.untrained), (True, buffer.trained)):
            real_steps = {n: ([e.group_id for e in s.members], s.evicted) for n, s in steps.items()}
            my_steps = {n: (s["members"], s["evicted"]) for n, s in self.steps.items() if s["trained"] is trained}
            assert real_steps == my_steps, f"{real_steps} != {my_steps}"
        for number, step in buffer.untrained.items():
            ahead, at = self.steps[number]["ahead"], step.plan.policy_version
            assert step.plan.staleness == {v: self.distance(v, at, ahead) for v in step.plan.staleness}
        assert list(state.readmitted) == self.readmitted
        numbers = (state.trained_steps, state.committed_step, state.cursor, state.next_group_id, state.version)
        assert numbers == (self.trained_steps, self.committed_step, self.cursor, self.next_id, self.version)
        assert state.tree.newest == max(self.places, default=NO_VERSION)
        dropped = sum(reason != "committed" for reason in self.finals.values())
        assert state.ledger.admitted == self.next_id == len(self.groups) + len(self.finals)
        assert sum(state.ledger.dropped.values()) == dropped

    def distance(self, a: int, b: int, ahead: int = 0) -> int:
        """Return the number of steps between two versions: those trained on either line after the two lines part.

        Two lines are shared as far as they took the same forks. `ahead` is added to the depth of `b`.
        """
        (*line_a, depth_a), (*line_b, depth_b) = self.places[a], self.places[b]
        depth_b += ahead
        shared = 0
        while shared < min(len(line_a), len(line_b)) and line_a[shared] == line_b[shared]:
            shared += 1
        leave_a = line_a[shared][1] if line_a[shared:] else depth_a
        leave_b = line_b[shared][1] if line_b[shared:] else depth_b
        return depth_a + depth_b - 2 * min(leave_a, leave_b)

    def _published(self, event: ev.Published) -> None:
        assert event.policy_version > max(self.places, default=NO_VERSION), "a version number was used twice"
        if not self.places:
            place: tuple[Any, ...] = (0,)
        else:
            *line, depth = self.places[min(self.places) if event.parent == NO_VERSION else event.parent]
            newest = self.places[max(self.places)]
            place = (*newest[:-1], depth) if self.again else (*line, (event.policy_version, depth), depth)
        self.places[event.policy_version], self.version = place, event.policy_version

    def _begun(self, event: ev.Begun) -> None:
        """Admit the members of a group, all with one prompt."""
        assert event.first == self.next_id, "a group id was used twice"
        self._draw(event.prompt_index)
        for member in range(event.first, event.first + event.members):
            self._admit(member, event.prompt_index)

    def _draw(self, prompt_index: int) -> None:
        if self.readmitted:
            assert self.readmitted.pop(0) == prompt_index
        else:
            assert prompt_index == self.cursor
            self.cursor += 1

    def _admit(self, group_id: int, prompt_index: int) -> dict[str, Any]:
        self.next_id += 1
        group = self.groups[group_id] = {"prompt": prompt_index, "attempt": -1}
        group |= {"state": "in_flight", "held": False, "step": None, "tokens": None}
        return group

    def _issued(self, event: ev.Issued) -> None:
        group = self.groups.get(event.group_id)
        if group is None:
            assert event.group_id == self.next_id, "a group id was used twice"
            self._draw(event.prompt_index)
            group = self._admit(event.group_id, event.prompt_index)
        assert group["state"] == "in_flight" and not group["held"] and event.attempt == group["attempt"] + 1
        group |= {"attempt": event.attempt, "held": True}

    def _returned(self, event: ev.Returned) -> None:
        assert self.groups[event.group_id]["held"]
        self.groups[event.group_id]["held"] = False

    def _inserted(self, event: ev.Inserted) -> None:
        group = self.groups[event.header.group_id]
        assert group["held"] and group["attempt"] == event.header.attempt, "a fenced attempt was taken"
        tokens = [run for trajectory in event.header.trajectories for run in trajectory.version_tokens]
        group |= {"state": "inserted", "held": False, "tokens": tokens}

    def _dropped(self, event: ev.Dropped) -> None:
        group = self.groups.pop(event.group_id)
        assert group["state"] != "trained"
        self.finals[event.group_id] = event.reason.value
        if group["step"] is not None:
            self.steps[group["step"]]["members"].remove(event.group_id)
        if event.readmit:
            self.readmitted.append(group["prompt"])

    def _sealed(self, event: ev.Sealed) -> None:
        assert event.step not in self.steps, "a step was planned anew"
        for group_id in event.members:
            assert self.groups[group_id]["step"] is None, "a group is in two steps"
            self.groups[group_id] |= {"state": "leased", "step": event.step}
        step = {"members": list(event.members), "trained": False, "evicted": False, "ahead": event.ahead}
        self.steps[event.step] = step | {"version": event.policy_version}

    def _trained(self, event: ev.Trained) -> None:
        step = self.steps[event.step]
        assert event.step == self.trained_steps and not step["trained"]
        for group_id in step["members"]:
            assert self.groups[group_id]["state"] == "leased"
            self.groups[group_id]["state"] = "trained"
            for version, _ in self.groups[group_id]["tokens"]:
                promised = self.distance(version, step["version"], step["ahead"])
                assert self.distance(version, self.version) == promised, "staleness at training is not what was judged"
        step["trained"] = True
        assert event.policy_version > max(self.places), "a version number was used twice"
        *line, depth = self.places[self.version]
        self.places[event.policy_version], self.version = (*line, depth + 1), event.policy_version
        self.trained_steps += 1

    def _evicted(self, event: ev.Evicted) -> None:
        self.steps[event.step]["evicted"] = True

    def _committed(self, event: ev.Committed) -> None:
        for number in [n for n in self.steps if n <= event.step]:
            for group_id in self.steps.pop(number)["members"]:
                assert self.groups.pop(group_id)["state"] == "trained"
                self.finals[group_id] = "committed"
        self.committed_step = event.step

    def _restored(self, event: ev.Restored) -> None:
        assert self.committed_step <= event.step
        for number in [n for n, step in self.steps.items() if step["trained"] and n > event.step]:
            step = self.steps[number]
            for group_id in step["members"]:
                self.groups[group_id]["state"] = "leased"
                if step["evicted"]:
                    self.groups[group_id] |= {"state": "in_flight", "held": False, "step": None, "tokens": None}
            step["trained"] = False
            if step["evicted"]:
                del self.steps[number]
        if not event.again:
            for number in [n for n, step in self.steps.items() if not step["trained"]]:
                for group_id in self.steps.pop(number)["members"]:
                    self.groups[group_id] |= {"state": "inserted", "step": None}
        self.trained_steps, self.again = event.step + 1, event.again
        self.version = event.policy_version if event.policy_version in self.places else NO_VERSION

    def _reloaded(self, event: ev.Reloaded) -> None:
        raise AssertionError("the server had forgotten what the learner's checkpoint rests on")
