"""An oracle of what must always hold of a replay core. It uses other means than the core: naive walks and tallies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from asyncrl.evaluation.orders import EvalAssignment, EvalSummary
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.buffer import Buffer
from asyncrl.types import NO_VERSION, DropReason, StalePolicy, StepPlan

FINAL = (
    DropReason.OVER_LENGTH,
    DropReason.FILTERED_ZERO_VARIANCE,
    DropReason.FILTERED,
    DropReason.INCOMPLETE,
)
"""Reasons that end a group when a worker reports them, however many tries are left."""


class Oracle:
    """Checks a core by naive ancestor walks and a tally of its events."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.places: dict[int, tuple[int, int]] = {}
        """Version -> its line and the number of steps trained up to it. A restart of the same learner goes on in its
        line; a resume begins another."""
        self.forks: list[tuple[int, int]] = []
        """Line -> the line and depth at which it began."""
        self.steps_of: dict[int, list[int]] = {}
        """Group id -> the steps it was trained in."""
        self.passed: dict[int, int] = {}
        """Id of a group in flight or inserted -> number of younger groups that were sealed before it."""
        self.issued: dict[int, int] = {}
        """Group id -> number of steps trained when it was last assigned."""
        self.rolled_back = False
        self.reported: DropReason | None = None
        """The reason that a worker is reporting at the moment."""
        self.evaluations: dict[int, tuple[str, int, int]] = {}
        """Job -> its set, rows and version, of evaluations asked for and neither superseded nor reported."""
        self.begun: set[int] = set()
        self.steps = 0
        """Number of steps trained in the surviving history."""
        self.judged: Counter[str] = Counter()
        """Counts of what was checked, over all histories."""
        self.begin({}, {}, 0, 0)

    def begin(self, states: dict[int, str], tries: dict[int, int], trained: int, dropped: int) -> None:
        self.states, self.tries = states, tries
        self.admitted = len(states) + trained + dropped
        self.trajectories: dict[int, int] = {}
        """Group id -> number of trajectories, of inserted groups."""
        self.siblings: dict[int, list[int]] = {}
        """Member of a group admitted by sample -> the group's first member, and its number of members."""
        self.members: dict[int, tuple[int, ...]] = {}
        """Step -> the members it was sealed with."""
        self.tally = {"in_flight": len(states), "inserted": 0, "leased": 0, "trained": trained, "dropped": dropped}

    def begin_from(self, snapshot: dict[str, Any], version: int) -> None:
        """Begin with what a checkpoint of `version` says, in a core without memory."""
        open_groups = dict.fromkeys((row[0] for row in snapshot["open"]), "in_flight")
        tries = {group_id: failures for group_id, _, _, failures in snapshot["open"]}
        self.begin(open_groups, tries, snapshot["trained"], sum(snapshot["dropped"].values()))
        self.siblings = {group_id: row for group_id, *row in snapshot["siblings"]}
        self.places = {v: p for v, p in self.places.items() if v <= version}
        # Versions after the checkpoint are forgotten, and so are the lines that began with them.
        del self.forks[1 + max(line for line, _ in self.places.values()) :]

    def publish(self, version: int, parent: int, *, trained: bool, again: bool = False) -> None:
        if not self.places:
            self.forks.append((-1, 0))
            self.places[version] = (0, 0)
            return
        line, depth = self.places[min(self.places) if parent == NO_VERSION else parent]
        if trained:
            self.places[version] = (line, depth + 1)
        elif again:
            self.places[version] = (len(self.forks) - 1, depth)
        else:
            self.forks.append((line, depth))
            self.places[version] = (len(self.forks) - 1, depth)

    def path(self, version: int) -> list[tuple[int, int]]:
        """Return the places from `version` back to the initial weights."""
        line, depth = self.places[version]
        result = []
        while line >= 0:
            fork, begin = self.forks[line]
            result += [(line, there) for there in range(depth, begin, -1)]
            line, depth = fork, min(begin, depth)
        return [*result, (0, 0)]

    def distance(self, a: int, b: int) -> int:
        return len(set(self.path(a)) ^ set(self.path(b)))

    def move(self, group_id: int, state: str) -> None:
        before = self.states.get(group_id)
        if before is not None:
            self.tally[before] -= 1
        self.tally[state] += 1
        self.states[group_id] = state
        if state == "dropped":
            assert not self.steps_of.get(group_id), "a trained group was dropped"
            del self.states[group_id]

    def returned(self, event: ev.Returned | ev.Dropped) -> None:
        """Check that a worker's report ends the group at once, or lets it be tried `max_attempts` times at most."""
        tries = self.tries.get(event.group_id, 0)
        if isinstance(event, ev.Returned):
            self.tries[event.group_id] = tries + event.counted
            assert self.tries[event.group_id] < self.settings.max_attempts, "a group is tried too often"
            assert self.reported not in FINAL, f"a group is tried again after {self.reported}"
        elif self.reported is not None:
            assert event.reason is self.reported, f"{self.reported} was reported, dropped is {event.reason}"
            assert self.reported in FINAL or tries + 1 == self.settings.max_attempts, "dropped before the last try"

    def watch(self, event: ev.Event) -> None:
        """Check an event and note it. Called with each event before the core applies it."""
        if isinstance(event, ev.Begun):
            self.begun_by_sample(event)
        elif isinstance(event, ev.Issued):
            self.issued[event.group_id] = self.steps
            if event.group_id not in self.states:
                self.admitted += 1
                self.move(event.group_id, "in_flight")
        elif isinstance(event, ev.Inserted):
            self.trajectories[event.header.group_id] = len(event.header.trajectories)
            members = sum(not trajectory.branch for trajectory in event.header.trajectories)
            if event.header.group_id in self.siblings:
                assert members == 1, "a member came with others"
            else:
                assert (self.settings.min_group_size or self.settings.group_size) <= members <= self.settings.group_size
            self.move(event.header.group_id, "inserted")
        elif isinstance(event, ev.Returned):
            self.returned(event)
        elif isinstance(event, ev.Dropped):
            self.returned(event)
            if event.reason in (DropReason.STALE, DropReason.DEAD_BRANCH) and (
                self.settings.stale_policy is StalePolicy.WAIT or self.settings.window
            ):
                assert self.rolled_back, "policy wait, or a window, dropped a group"
            self.move(event.group_id, "dropped")
        elif isinstance(event, ev.Sealed):
            assert len(set(event.members)) == len(event.members)
            assert len({self.whose(member) for member in event.members}) == self.settings.groups_per_step
            self.members[event.step] = event.members
            self.whole(event)
            self.windowed(event)
            for group_id in event.members:
                self.move(group_id, "leased")
        elif isinstance(event, ev.Reused):
            for group_id in event.groups:
                assert self.states[group_id] == "trained"
                self.move(group_id, "inserted")
        elif isinstance(event, ev.Retired):
            assert self.steps_of[event.group_id], "a group was retired that was never trained"
            self.move(event.group_id, "trained")

    def begun_by_sample(self, event: ev.Begun) -> None:
        """Check that a group admitted by sample has room for all its members at once, and admit them."""
        settings, tally = self.settings, self.tally
        assert event.members == settings.group_size and (event.first == self.admitted or self.rolled_back)
        assert tally["in_flight"] + event.members <= settings.max_in_flight * event.members
        if not self.rolled_back:
            untrained = tally["in_flight"] + tally["inserted"] + tally["leased"]
            window = (1 + settings.pipeline_depth) * settings.groups_per_step
            assert untrained + event.members <= window * event.members
        for member in range(event.first, event.first + event.members):
            assert member not in self.states
            self.siblings[member] = [event.first, event.members]
            self.admitted += 1
            self.move(member, "in_flight")

    def whose(self, member: int) -> int:
        return self.siblings[member][0] if member in self.siblings else member

    def whole(self, event: ev.Sealed) -> None:
        """Check that a sealed step has all remaining members of each group, adjacent and in the order of their ids,
        and enough of them."""
        may_lack = self.settings.group_size - (self.settings.min_group_size or self.settings.group_size)
        for first, begun_with in {tuple(self.siblings[m]) for m in event.members if m in self.siblings}:
            mine = [member for member in event.members if self.whose(member) == first]
            at = event.members.index(mine[0])
            assert list(event.members[at : at + len(mine)]) == sorted(mine), "siblings are apart"
            everybody = [member for member in range(first, first + begun_with) if member in self.states]
            assert mine == everybody, f"step {event.step} has {mine} of the open members {everybody}"
            assert begun_with - len(mine) <= may_lack, "a group with too few members is trained"

    def windowed(self, event: ev.Sealed) -> None:
        """Check that at most `window - 1` younger groups pass a group, and that it is trained soon after it was
        assigned."""
        settings, size = self.settings, self.settings.groups_per_step
        if not settings.window:
            return
        members = set(event.members)
        for group_id, state in self.states.items():
            if state in ("in_flight", "inserted") and group_id not in members:
                self.passed[group_id] = self.passed.get(group_id, 0) + sum(member > group_id for member in members)
                assert self.passed[group_id] < settings.window, f"{self.passed[group_id]} groups passed {group_id}"
        latest = ((1 + settings.pipeline_depth) * size + settings.window - 2) // size
        for group_id in members if not self.rolled_back else ():
            waited = event.step - self.issued[group_id]
            assert waited <= latest, f"group {group_id} was trained {waited} steps after it was given out"

    def train(self, plan: StepPlan, version: int) -> None:
        """Check a step trained by a learner that holds `version`."""
        settings = self.settings
        assert len(plan.groups) == settings.groups_per_step
        fresh_total = 0
        for group in plan.groups:
            whose = self.whose(group.group_id)
            mine = [member for member in self.members[plan.step] if self.whose(member) == whose]
            assert len(group.trajectories) == sum(map(self.trajectories.__getitem__, mine)), "it lost or gained some"
            for member in mine:
                steps = self.steps_of.setdefault(member, [])
                assert plan.step not in steps, f"group {member} is in step {plan.step} twice"
                steps.append(plan.step)
                assert len(steps) <= settings.max_times_sampled, f"group {member} trained in steps {steps}"
            fresh_of_group = 0
            for trajectory in group.trajectories:
                for token_version, count in trajectory.version_tokens:
                    contributes = plan.staleness[token_version] <= plan.max_staleness
                    age = self.distance(token_version, version)
                    assert age == plan.staleness[token_version]
                    if contributes:
                        assert age <= settings.max_staleness, f"a token of staleness {age} was trained"
                        fresh_of_group += count
                        self.judged["tokens at the bound"] += count * (age == settings.max_staleness > 0)
                    elif settings.stale_policy is not StalePolicy.MASK or settings.window:
                        assert self.rolled_back, f"policy {settings.stale_policy}, {settings.window=}, masked a token"
            assert fresh_of_group > 0
            fresh_total += fresh_of_group
        assert fresh_total > 0
        self.judged += Counter({"steps": 1, "tokens": fresh_total})

    def trained(self, event: ev.Trained, core: ReplayCore) -> None:
        """Move the groups of a step to "trained". A group that a restore planned for a later step too stays leased."""
        self.steps = event.step + 1
        for entry in core.state.buffer.untrained[event.step].members:
            if not any(step != event.step for step in entry.planned):
                self.move(entry.group_id, "trained")

    def asked_to_evaluate(self, job: int, eval_set: str, rows: int, version: int) -> None:
        """Note an evaluation. It supersedes those of the same set that no worker has begun."""
        kept = {j: of for j, of in self.evaluations.items() if of[0] != eval_set or j in self.begun}
        self.evaluations = kept | {job: (eval_set, rows, version)}

    def handed_out(self, order: EvalAssignment) -> None:
        assert order.job_id in self.evaluations, "rows of an evaluation that is over are handed out"
        self.begun.add(order.job_id)

    def evaluated(self, summaries: Sequence[EvalSummary]) -> None:
        """Check that each evaluation ends once, has every row once, and used no older weights than asked for."""
        for summary in summaries:
            _, rows, version = self.evaluations.pop(summary.job_id)
            assert summary.count + summary.failed == rows, f"{rows} rows were asked for: {summary}"
            assert version <= summary.version_min <= summary.version_max

    def restore(self, step: int) -> None:
        self.steps = step + 1
        self.passed.clear()
        self.steps_of = {group: [n for n in steps if n <= step] for group, steps in self.steps_of.items()}

    def check(self, core: ReplayCore) -> None:
        """Check the conservation law against the oracle's own tally."""
        ledger, tally = core.state.ledger, self.tally
        counted = {state.value: count for state, count in ledger.counts.items()}
        counted["dropped"] = sum(ledger.dropped.values())
        assert counted == tally, f"{counted} != {tally}"
        assert ledger.admitted == self.admitted == sum(tally.values())

    def undo(self, buffer: Buffer, step: int, *, branch: bool) -> None:
        """Set the state of the groups trained after `step`: planned again, or generated again if no
        payload is left. On a branch nothing stays planned."""
        steps = buffer.trained
        moved = {entry for number, sealed in steps.items() if number > step for entry in sealed.members}
        if branch:
            moved |= {entry for sealed in buffer.untrained.values() for entry in sealed.members}
        for entry in sorted(moved, key=lambda entry: entry.group_id):
            before = [number for number in self.steps_of.get(entry.group_id, ()) if number <= step]
            again = [number for number in entry.kept if number > step and not steps[number].evicted]
            if not branch and (again or entry.planned):
                state = "leased"
            elif before:
                state = "trained"
            else:
                state = "in_flight" if entry.payload is None else "inserted"
            self.move(entry.group_id, state)
