"""The auditor's books beside the simulated server: they follow every event, and are compared with the real state."""

from __future__ import annotations

from asyncrl.replay.audit.auditor import Auditor
from asyncrl.replay.audit.books import Group
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.state import ReplayState


class Model(Auditor):
    """Prompts are drawn in order, and before them those that were readmitted; the auditor does not keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[int] = set()
        """Ids of the groups that were dropped."""
        self.cursor = 0
        self.readmitted: list[int] = []

    def apply(self, event: ev.Event) -> None:
        assert not isinstance(event, ev.Reloaded), "the server had forgotten what the learner's checkpoint rests on"
        if isinstance(event, ev.Begun) or (isinstance(event, ev.Issued) and event.group_id not in self.groups):
            self._draw(event.prompt_index)
        elif isinstance(event, ev.Dropped):
            self.gone.add(event.group_id)
            if event.readmit:
                self.readmitted.append(self.groups[event.group_id].prompt_index)
        self.watch(self.events, event)
        assert not self.violations, self.violations

    def compare(self, state: ReplayState) -> None:
        """Raise AssertionError if the real state differs from the books."""
        real = {
            entry.group_id: (entry.state.value, entry.prompt_index, entry.attempt, entry.group_id in state.held)
            for entry in state.ledger.entries.values()
        }
        mine = {
            group_id: (group.state, group.prompt_index, group.attempt, group.state == "in_flight" and group.held)
            for group_id, group in self.groups.items()
            if not self._committed_for_good(group)
        }
        assert real == mine, f"{real} != {mine}"
        buffer = state.buffer
        for trained, steps in ((False, buffer.untrained), (True, buffer.trained)):
            real_steps = {n: ([e.group_id for e in s.members], s.evicted) for n, s in steps.items()}
            my_steps = {
                number: (list(step.members), step.evicted)
                for number, step in self.steps.items()
                if step.trained is trained and not step.committed
            }
            assert real_steps == my_steps, f"{real_steps} != {my_steps}"
        for number, sealed in buffer.untrained.items():
            ahead, at = self.steps[number].ahead, sealed.plan.policy_version
            assert sealed.plan.staleness == {v: self.tree.distance(v, at, ahead) for v in sealed.plan.staleness}
        assert list(state.readmitted) == self.readmitted
        numbers = (state.trained_steps, state.committed_step, state.cursor, state.next_group_id, state.version)
        assert numbers == (self.trained_steps, self.committed_step, self.cursor, self.next_id, self.version)
        assert state.tree.newest == self.tree.newest
        assert state.ledger.admitted == self.admitted == self.next_id == len(self.groups) + len(self.gone)
        assert sum(state.ledger.dropped.values()) == len(self.gone)

    def _draw(self, prompt_index: int) -> None:
        if self.readmitted:
            assert self.readmitted.pop(0) == prompt_index
        else:
            assert prompt_index == self.cursor
            self.cursor += 1

    def _committed_for_good(self, group: Group) -> bool:
        return group.state == "trained" and all(self.steps[number].committed for number in group.steps)
