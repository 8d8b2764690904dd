"""An oracle of what must always hold of a replay core: the books of the auditor, and rules that these do not keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from asyncrl.evaluation.orders import EvalAssignment, EvalSummary
from asyncrl.replay.audit.auditor import Auditor
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.types import DropReason, StalePolicy, StepPlan, TrajectoryHeader

FINAL = (
    DropReason.OVER_LENGTH,
    DropReason.FILTERED_ZERO_VARIANCE,
    DropReason.FILTERED,
    DropReason.INCOMPLETE,
)
"""Reasons that end a group when a worker reports them, however many tries are left."""


class Oracle:
    """Checks a core by the auditor's books, and by what the books do not keep."""

    def __init__(self, settings: AdmissionSettings) -> None:
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
        self.judged: Counter[str] = Counter()
        """Counts of what was checked, over all histories."""
        self.begin(settings, {})

    def begin(self, settings: AdmissionSettings, tries: dict[int, int]) -> None:
        """Begin with a core without memory. `tries`: of the groups that its checkpoint knows."""
        self.settings, self.tries = settings, tries
        self.books = Auditor()
        self.books.run = {"settings": settings.plain()}

    def states(self) -> dict[int, str]:
        """Return the states of the groups that were not dropped."""
        return {group_id: group.state for group_id, group in self.books.groups.items()}

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
            self.issued[event.group_id] = self.books.trained_steps
        elif isinstance(event, ev.Returned):
            self.returned(event)
        elif isinstance(event, ev.Dropped):
            self.returned(event)
            if event.reason in (DropReason.STALE, DropReason.DEAD_BRANCH) and (
                self.settings.stale_policy is StalePolicy.WAIT or self.settings.window
            ):
                assert self.rolled_back, "policy wait, or a window, dropped a group"
        elif isinstance(event, ev.Sealed):
            self.together(event)
            self.windowed(event)
        self.books.watch(self.books.events, event)
        assert not self.books.violations, self.books.violations

    def begun_by_sample(self, event: ev.Begun) -> None:
        """Check that a group admitted by sample has room for all its members at once."""
        settings, tally = self.settings, self.books.counts()
        assert event.members == settings.group_size and (event.first == self.books.admitted or self.rolled_back)
        assert tally["in_flight"] + event.members <= settings.max_in_flight * event.members
        if not self.rolled_back:
            untrained = tally["in_flight"] + tally["inserted"] + tally["leased"]
            window = (1 + settings.pipeline_depth) * settings.groups_per_step
            assert untrained + event.members <= window * event.members

    def whose(self, member: int) -> int:
        group = self.books.groups[member]
        return group.first if group.siblings else member

    def together(self, event: ev.Sealed) -> None:
        """Check that the members of each group are adjacent in a sealed step, and in the order of their ids."""
        for first, mine in groupby(sorted(event.members), self.whose):
            members = list(mine)
            at = event.members.index(members[0])
            assert list(event.members[at : at + len(members)]) == members, f"siblings of {first} are apart"

    def windowed(self, event: ev.Sealed) -> None:
        """Check that at most `window - 1` younger groups pass a group, and that it is trained soon after it was
        assigned."""
        settings, size = self.settings, self.settings.groups_per_step
        if not settings.window:
            return
        members = set(event.members)
        for group_id, state in self.states().items():
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
            mine = [m for m in self.books.steps[plan.step].members if self.whose(m) == self.whose(group.group_id)]
            made = [trajectory for member in mine for trajectory in self.inserted(member)]
            assert list(group.trajectories) == made, "it lost or gained some"
            fresh_of_group = 0
            for trajectory in group.trajectories:
                for token_version, count in trajectory.version_tokens:
                    contributes = plan.staleness[token_version] <= plan.max_staleness
                    age = self.books.tree.distance(token_version, version)
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

    def inserted(self, member: int) -> tuple[TrajectoryHeader, ...]:
        header = self.books.groups[member].header
        assert header is not None
        return header.trajectories

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

    def check(self, core: ReplayCore) -> None:
        """Check the conservation law against the books."""
        ledger, books = core.state.ledger, self.books
        counted = {state.value: count for state, count in ledger.counts.items() if count}
        assert counted == dict(books.counts()), f"{counted} != {books.counts()}"
        dropped = {reason.value: count for reason, count in ledger.dropped.items() if count}
        assert dropped == dict(books.dropped)
        assert ledger.admitted == books.admitted == sum(counted.values()) + sum(dropped.values())
