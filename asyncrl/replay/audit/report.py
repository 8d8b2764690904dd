"""`asyncrl audit RUN`: does the run's journal balance? Every group accounted for, none trained twice, no token trained
over the bound; and what the run wasted. From the journal alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncrl.config import JOURNAL_DIR
from asyncrl.errors import JournalError
from asyncrl.replay.audit.auditor import Auditor
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.journal.recovery import read_journal

EXIT_BALANCES, EXIT_WRONG, EXIT_UNREADABLE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the journal says of a run. Counts are groups unless named otherwise; what a rollback of the learner undid
    is not in them."""

    run_id: str
    from_start: bool
    """The journal reaches back to the first event; otherwise what was before it is taken on trust from a snapshot."""
    on_trust_from: int | None
    """Trained steps of the newest checkpoint that told what this journal never saw, an earlier one being gone."""
    finished: bool
    events: int
    admitted: int
    in_flight: int
    inserted: int
    leased: int
    trained: int
    dropped: dict[str, int]
    trained_steps: int
    committed_steps: int
    rollbacks: int
    """Restores that undid trained steps."""
    versions: int
    lineages: int
    by_sample: bool
    """Groups are admitted by sample: then counts are of their members."""
    max_times_sampled: int
    """Limit on the number of steps in which a group may be trained."""
    trained_in: dict[int, int]
    """Number of steps -> groups trained in so many that will be in no other step, of those that the journal names."""
    retired: int
    """Number of those groups that became too old for a further step, or outlived the run."""
    max_staleness: int | None
    """The staleness bound; None if the journal does not name it."""
    staleness: dict[int, int]
    """Staleness -> loss tokens trained at it."""
    wasted_tokens: dict[str, int]
    """Reason -> loss tokens that reached the server and count in no gradient."""
    lost_attempts: int
    """Attempts that ended without a group; how many tokens they had, nobody knows."""
    violation_count: int
    violations: list[str] = field(default_factory=list)
    """The first ones, each with the journal position of the event that broke the rule."""

    @property
    def balances(self) -> bool:
        return self.violation_count == 0


def audit(events: Iterable[tuple[int, ev.Event]]) -> Audit:
    """Check a history of `(journal position, event)`, whole or from a snapshot on."""
    books = Auditor()
    for position, event in events:
        books.watch(position, event)
    books.close()
    states = books.counts()
    steps = [step for step in books.steps.values() if step.trained]
    bound = books.bound
    uses = books.uses_of_trained()
    trained_in: dict[int, int] = {}
    for (number, _), groups in sorted(uses.items()):
        trained_in[number] = trained_in.get(number, 0) + groups
    ages: dict[int, int] = {}
    wasted = dict(books.wasted)
    for step in steps:
        for age, tokens in step.ages.items():
            if bound is None or age <= bound:
                ages[age] = ages.get(age, 0) + tokens
            else:
                wasted["over_age"] = wasted.get("over_age", 0) + tokens
    return Audit(
        run_id=str(books.run.get("run_id", "")),
        from_start=books.from_start,
        on_trust_from=books.on_trust_from,
        finished=books.finished,
        events=books.events,
        admitted=books.admitted,
        in_flight=states["in_flight"],
        inserted=states["inserted"],
        leased=states["leased"],
        trained=states["trained"],
        dropped=dict(sorted(books.dropped.items())),
        trained_steps=books.trained_steps,
        committed_steps=books.committed_step + 1,
        rollbacks=books.rollbacks,
        versions=len(books.tree),
        lineages=1 + books.tree.forks if len(books.tree) else 0,
        by_sample=books.settings.get("by_sample", False),
        max_times_sampled=books.uses,
        trained_in=trained_in,
        retired=sum(groups for (_, retired), groups in uses.items() if retired),
        max_staleness=bound,
        staleness=dict(sorted(ages.items())),
        wasted_tokens=dict(sorted(wasted.items())),
        lost_attempts=books.lost_attempts,
        violation_count=books.violation_count,
        violations=books.violations,
    )


def _uses(found: Audit) -> str:
    if found.max_times_sampled == 1:
        return "one step"
    each = ", ".join(f"{groups:,} in {number}" for number, groups in sorted(found.trained_in.items(), reverse=True))
    fewer = f" ({found.retired:,} became too old for a further step, or the run ended)" if found.retired else ""
    return f"at most {found.max_times_sampled} steps: {each}{fewer}"


def table(found: Audit) -> str:
    """For eyes."""
    lost = sum(found.dropped.values())
    start = "from its first event" if found.from_start else "from a snapshot (earlier segments were recycled)"
    if found.on_trust_from is not None:
        start = f"from the checkpoint of step {found.on_trust_from}, unverified, because the journal before it is gone"
    lines = [
        f"run {found.run_id or '?'}, {found.events:,} events {start}; "
        + ("finished" if found.finished else "not finished"),
        "",
        f"groups     {found.admitted:>10,}  admitted" + (" (members of groups, here and below)" * found.by_sample),
        f"         = {found.trained:>10,}  trained, each in " + _uses(found),
        f"         + {lost:>10,}  dropped" + _listed(found.dropped),
        f"         + {found.leased:>10,}  leased",
        f"         + {found.inserted:>10,}  inserted",
        f"         + {found.in_flight:>10,}  in flight",
        "",
        f"steps      {found.trained_steps:>10,}  trained, {found.committed_steps:,} of them in a durable checkpoint; "
        f"{found.rollbacks} rollbacks",
        f"versions   {found.versions:>10,}  published, in {found.lineages} lines of descent",
        "",
        "staleness of trained tokens" + ("" if found.max_staleness is None else f" (bound {found.max_staleness})"),
        *_histogram(found.staleness),
        "",
        f"wasted     {sum(found.wasted_tokens.values()):>10,}  tokens" + _listed(found.wasted_tokens),
        f"           {found.lost_attempts:>10,}  attempts ended without a group",
        "",
    ]
    if found.balances:
        most = "two" if found.max_times_sampled == 1 else f"more than {found.max_times_sampled}"
        return "\n".join([*lines, f"balances: every admitted group is accounted for, none is in {most} steps"])
    shown = [f"  {text}" for text in found.violations]
    more = found.violation_count - len(shown)
    return "\n".join(
        [*lines, f"DOES NOT BALANCE: {found.violation_count} violations", *shown]
        + ([f"  and {more} more"] * (more > 0))
    )


def _listed(counts: dict[str, int]) -> str:
    return ": " + ", ".join(f"{name} {count:,}" for name, count in counts.items()) if counts else ""


def _histogram(tokens: dict[int, int]) -> list[str]:
    total = sum(tokens.values())
    return [
        f"  {age:>3}  {count:>12,} tokens  {100 * count / total:5.1f} %  {'#' * round(40 * count / total)}"
        for age, count in tokens.items()
    ] or ["  none"]


def journal_of(run: Path) -> Path:
    """The journal folder of a run folder; of the journal folder itself, too."""
    return run if run.name == JOURNAL_DIR else run / JOURNAL_DIR


def main(run: Path, *, as_json: bool) -> tuple[int, str]:
    """Print the audit of a run folder.

    Returns:
        0 when it balances, 1 when it does not, 2 when the journal cannot be read; and why it cannot.
    """
    try:
        found = audit(read_journal(journal_of(run)))
    except (JournalError, OSError) as error:
        told = unread(error)
        print(f"asyncrl audit: {told}", file=sys.stderr)
        return EXIT_UNREADABLE, told
    print(json.dumps({**asdict(found), "balances": found.balances}) if as_json else table(found))
    return EXIT_BALANCES if found.balances else EXIT_WRONG, ""


def unread(error: OSError) -> str:
    """Say which file cannot be read and why."""
    if isinstance(error, JournalError) or not error.filename:
        return str(error)
    access = ". Ask its owner to give this user access" if isinstance(error, PermissionError) else ""
    return f"{error.filename} cannot be read: {error.strerror}{access}"
