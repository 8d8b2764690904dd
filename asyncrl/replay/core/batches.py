"""The consumption gate at work: which waiting groups make up a step, which are dropped, and what to wait for.

Reads the state and decides; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.replay.core.admission import AdmissionSettings, Verdict, judge, may_train, over_committed
from asyncrl.replay.core.ledger import Entry
from asyncrl.replay.core.order import SELECTORS, Waiting, most_urgent, within_window
from asyncrl.replay.core.state import ReplayState
from asyncrl.types import NO_VERSION, StalePolicy


@dataclass(slots=True, kw_only=True)
class Choice:
    batch: list[Entry] | None = None
    """The members in order; None: not yet."""
    stale: list[Entry] = field(default_factory=list)
    """To be dropped (retired, if trained before), whether or not there is a batch."""
    waiting_for: str = ""
    """`generation`: too few groups. `stale_wait`: policy `wait`, or the window, holds the learner for groups still in
    flight."""


class _Ages:
    """Staleness of versions at the moment the step would be trained, each computed once."""

    def __init__(self, state: ReplayState, ahead: int) -> None:
        self._tree, self._version, self._ahead = state.tree, state.version, ahead
        self._known: dict[int, int] = {}

    def __getitem__(self, version: int) -> int:
        age = self._known.get(version)
        if age is None:
            age = self._known[version] = self._tree.distance(version, self._version, self._ahead)
        return age


def choose_batch(state: ReplayState, settings: AdmissionSettings, *, step: int, ahead: int, seed: int = 0) -> Choice:
    """The batch of `step`, to be trained `ahead` publications after the current version."""
    if state.version == NO_VERSION:
        return Choice(waiting_for="publication")
    waiting = list(state.buffer.waiting.values())
    if len(waiting) < settings.groups_per_step:
        return Choice(waiting_for="generation")
    ages = _Ages(state, ahead)
    bound = settings.max_staleness
    verdicts, fresh = _judged(waiting, settings, ages)
    chosen = {entry.group_id for entry in fresh}
    choice = Choice(stale=[entry for entry in waiting if entry.group_id not in chosen])
    if len(fresh) < settings.groups_per_step:
        choice.waiting_for = "generation"
        return choice

    candidates = []
    for entry in sorted(fresh, key=lambda entry: entry.group_id) if settings.window else fresh:
        age = verdicts[entry.group_id].staleness
        candidates.append(Waiting(entry=entry, staleness=age, slack=bound - age))
    select = most_urgent if settings.stale_policy is StalePolicy.WAIT else SELECTORS[settings.order]
    order = select(candidates, seed=seed, step=step)
    if settings.window:
        order = within_window(order, [*state.held, *state.pending], settings.window)
    if len(order) < settings.groups_per_step:
        choice.waiting_for = "stale_wait"
        return choice
    if settings.stale_policy is StalePolicy.WAIT:
        left = [group.slack for group in order[settings.groups_per_step :]]
        in_flight = [bound - ages[entry.served_version] for entry in state.held.values()]
        if _must_wait(left, in_flight, settings.groups_per_step):
            choice.waiting_for = "stale_wait"
            return choice
    choice.batch = [group.entry for group in order[: settings.groups_per_step]]
    return choice


def certain_members(state: ReplayState, settings: AdmissionSettings) -> list[Entry]:
    """Whom the batch of the next step begins with, whatever comes in before it is sealed: in the order of arrival
    nobody passes those that wait, and until the step is trained they get no older. Empty with any other order."""
    in_turn = settings.order == "fifo" and not settings.window and settings.stale_policy is not StalePolicy.WAIT
    if not in_turn or state.version == NO_VERSION:
        return []
    _, fresh = _judged(list(state.buffer.waiting.values()), settings, _Ages(state, ahead=0))
    return fresh[: settings.groups_per_step]


def _judged(waiting: list[Entry], settings: AdmissionSettings, ages: _Ages) -> tuple[dict[int, Verdict], list[Entry]]:
    """The verdict on each, by group id, and those that may be trained."""
    verdicts = {entry.group_id: _judge(entry, ages, settings.max_staleness) for entry in waiting}
    # A run that is resumed with a lower limit may have groups waiting that have reached it.
    usable = [entry for entry in waiting if entry.trained < settings.max_times_sampled]
    return verdicts, [entry for entry in usable if may_train(verdicts[entry.group_id], settings.stale_policy)]


def _judge(entry: Entry, ages: _Ages, bound: int) -> Verdict:
    assert entry.header is not None  # Waiting and leased groups were inserted.
    return judge(entry.header, ages, bound)  # type: ignore[arg-type]


def _must_wait(left: list[int], in_flight: list[int], groups_per_step: int) -> bool:
    """Sealing now would make some group over-age, and waiting for one still in flight can prevent it.

    Where every urgent group is here already (possible only after a rollback), waiting would never end.
    """
    violated = over_committed([*left, *in_flight], groups_per_step)
    return violated is not None and any(0 <= slack <= violated for slack in in_flight)
