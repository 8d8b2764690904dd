"""The run as the core sees it: settings, clock, durable state and live workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from asyncrl.errors import FencedError
from asyncrl.pace import PACES
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.core.live.evaluations import Evaluations
from asyncrl.replay.core.live.metrics import Meter
from asyncrl.replay.core.live.workers import FAILED, Workers
from asyncrl.types import DropReason

MAX_AGE = 64
"""The largest age of `replay/inserted_age_<age>`, in versions; older groups are counted there."""


class Run:
    """Shared by the parts of `ReplayCore`. The durable state changes only through `record`."""

    def __init__(
        self,
        settings: AdmissionSettings,
        clock: Callable[[], float],
        *,
        seed: int,
        heartbeat_timeout_s: float,
        journal: Callable[[ev.Event], None] | None,
        state: ReplayState,
    ) -> None:
        self.settings, self.seed, self.clock, self.state = settings, seed, clock, state
        self.workers = Workers(heartbeat_timeout_s)
        self.evaluations = Evaluations(settings.max_attempts)
        self.meter = Meter(clock())
        self.on_stale: Callable[[Entry, DropReason], None] = lambda entry, reason: None
        """Called before a group is dropped for its age."""
        self._journal = journal

    def record(self, event: ev.Event) -> None:
        """Write an event to the journal, then apply it. Every durable change goes through here."""
        if self._journal is not None:
            self._journal(event)
        self.state.apply(event)

    def refuse_replaced(self, peer: str, incarnation: str) -> None:
        """Raises FencedError when a newer incarnation of this peer has said hello."""
        if self.state.peers.replaced(peer, incarnation):
            raise FencedError(
                f"{peer!r} was replaced by a newer process of the same name, so this one must stop. If the newer one "
                "was started by mistake, stop it: a run can have only one process of each name"
            )

    def counts(self) -> dict[str, float]:
        """Current counts: groups by state, drops by reason, the queue by age. Has no side effects."""
        ledger = self.state.ledger
        row = {f"replay/{state.value}": float(count) for state, count in ledger.counts.items()}
        row |= {f"replay/dropped_{name}": float(count) for name, count in ledger.dropped_by_name().items()}
        row |= {
            "replay/admitted": float(ledger.admitted),
            "replay/bytes": float(self.state.buffer.nbytes),
            "replay/workers": float(len(self.workers.live)),
            "replay/workers_other_code": float(self.workers.with_other_code()),
        }
        return row | self._queue_by_age()

    def metrics(self) -> dict[str, float]:
        """Return ledger counts, costs and rates; the rates are since the last call."""
        row = self.counts()
        row |= {"data/overlong": self.workers.total("overlong_prompts")}
        row |= self._of_draws()
        row |= {"reward/failed": self.workers.total("rewards_failed")}
        by_reason = {reason: self.workers.total(stat) for reason, stat in FAILED.items()}
        row |= {f"reward/failed_{reason}": count for reason, count in by_reason.items() if count}
        row |= self.meter.goodput(self.workers)
        row |= {"idle/rollout_s": self.workers.total("waiting_s"), "idle/rollout_busy_s": self.workers.total("busy_s")}
        row |= {f"engine/{name}": total for name in PACES if (total := self.workers.total(name))}
        return row | self.meter.row(self.clock(), self.workers)

    def _queue_by_age(self) -> dict[str, float]:
        """Count groups waiting to be trained, by their age in versions since they were begun."""
        now = self.state.version
        ages = Counter(min(MAX_AGE, max(0, now - each.served_version)) for each in self.state.buffer.waiting.values())
        return {f"replay/inserted_age_{age}": float(count) for age, count in sorted(ages.items())}

    def _of_draws(self) -> dict[str, float]:
        """Metrics of the measured pass rates, if prompts are drawn by them (`data.curriculum`)."""
        draws, wanted = self.state.draws, self.settings.curriculum
        if draws is None or wanted is None:
            return {}
        known = draws.rates.summary(wanted.low, wanted.high)
        row = {f"data/pass_rate_{name}": share for name, share in known.items()}
        return row | {"data/passed_over": float(draws.passed_over)}
