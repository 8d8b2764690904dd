"""Apply the consumption gate: which waiting groups make up a step, and which are dropped.

Reads the state and decides; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.replay.core.admission import AdmissionSettings, Verdict, judge, may_train, over_committed
from asyncrl.replay.core.batches.order import Waiting, ordered, within_window
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.durable.siblings import Group, is_short, whole_groups
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.types import NO_VERSION, StalePolicy


@dataclass(slots=True, kw_only=True)
class Choice:
    batch: list[Entry] | None = None
    """The members in order; None: the step cannot be sealed yet."""
    stale: list[Group] = field(default_factory=list)
    """Groups to be dropped (retired, if trained before), whether or not there is a batch."""
    short: list[Group] = field(default_factory=list)
    """Groups to be dropped as incomplete, likewise: too many of their members were lost."""


class _Ages(dict[int, int]):
    """Staleness of versions at the time when the step would be trained, each computed once."""

    def __init__(self, state: ReplayState, ahead: int) -> None:
        self._state, self._ahead = state, ahead

    def __missing__(self, version: int) -> int:
        age = self[version] = self._state.tree.distance(version, self._state.version, self._ahead)
        return age


def choose_batch(state: ReplayState, settings: AdmissionSettings, *, ahead: int) -> Choice:
    """Choose the batch that will be trained `ahead` publications after the current version."""
    if state.version == NO_VERSION or len(state.buffer.waiting) < settings.groups_per_step:
        return Choice()
    ages = _Ages(state, ahead)
    bound = settings.max_staleness
    whole, parts = _waiting(state)
    judged = _Judged(whole, settings, ages)
    choice = Choice(stale=judged.stale, short=judged.short)
    if len(judged.fresh) < settings.groups_per_step:
        return choice

    candidates, groups = [], {}
    for group in sorted(judged.fresh, key=lambda group: group[0].group_id) if settings.window else judged.fresh:
        age = judged.verdicts[group[0].whose].staleness
        groups[group[0].whose] = group
        candidates.append(Waiting(entry=group[0], staleness=age, slack=bound - age))
    if settings.stale_policy is StalePolicy.WAIT:  # the most urgent first, whatever `replay.order` is
        order = sorted(candidates, key=lambda group: group.slack)
    else:
        order = ordered(candidates, settings.order)
    if settings.window:
        order = within_window(order, [*state.held, *state.pending], settings.window)
    if len(order) < settings.groups_per_step:
        return choice
    if settings.stale_policy is StalePolicy.WAIT:
        left = [group.slack for group in order[settings.groups_per_step :]]
        in_flight = _slacks_in_flight(state, parts, ages, bound)
        if _must_wait(left, in_flight, settings.groups_per_step):
            return choice
    choice.batch = [entry for group in order[: settings.groups_per_step] for entry in groups[group.entry.whose]]
    return choice


def _waiting(state: ReplayState) -> tuple[list[Group], list[Group]]:
    return whole_groups(state.buffer.waiting.values(), [*state.held.values(), *state.pending.values()])


class _Judged:
    """Whole groups, in order, sorted into those that may be trained and those that may not, by reason."""

    def __init__(self, whole: list[Group], settings: AdmissionSettings, ages: _Ages) -> None:
        self.verdicts: dict[int, Verdict] = {}
        """Verdicts by `Entry.whose`."""
        self.fresh: list[Group] = []
        self.stale: list[Group] = []
        self.short: list[Group] = []
        for group in whole:
            verdict = self.verdicts[group[0].whose] = _judge(group, ages, settings.max_staleness)
            # A run resumed with a lower limit may have waiting groups that have already reached it.
            usable = group[0].trained < settings.max_times_sampled
            if is_short(group, settings.group_size - settings.fewest_members):
                self.short.append(group)
            elif usable and may_train(verdict, settings.stale_policy):
                self.fresh.append(group)
            else:
                self.stale.append(group)


def _judge(group: Group, ages: _Ages, bound: int) -> Verdict:
    """Judge all members of a group together: it is one group for both gates."""
    verdicts = [judge(entry.header, ages, bound) for entry in group if entry.header is not None]
    if len(verdicts) == 1:
        return verdicts[0]
    return Verdict(
        fresh_tokens=sum(verdict.fresh_tokens for verdict in verdicts),
        stale_tokens=sum(verdict.stale_tokens for verdict in verdicts),
        staleness=max(verdict.staleness for verdict in verdicts),
    )


def _slacks_in_flight(state: ReplayState, parts: list[Group], ages: _Ages, bound: int) -> list[int]:
    """For each group that is not whole but may have tokens: the number of steps its oldest token can still wait."""
    slacks: dict[int, int] = {}
    for entry in state.held.values():
        slack = bound - ages[entry.served_version]
        slacks[entry.whose] = min(slack, slacks.get(entry.whose, slack))
    for group in parts:
        slack = bound - _judge(group, ages, bound).staleness
        slacks[group[0].whose] = min(slack, slacks.get(group[0].whose, slack))
    return list(slacks.values())


def _must_wait(left: list[int], in_flight: list[int], groups_per_step: int) -> bool:
    """Return whether sealing now would make some group over-age and waiting for one still in flight can prevent it.

    If every urgent group is here already (possible only after a rollback), waiting would never end.
    """
    violated = over_committed([*left, *in_flight], groups_per_step)
    return violated is not None and any(0 <= slack <= violated for slack in in_flight)
