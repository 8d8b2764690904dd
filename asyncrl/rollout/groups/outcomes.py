"""Names what drops every group, and ends a run of which no group can ever be trained.

consumes: the outcome of each group that this worker made · waits for: nothing

While every group is dropped no step is trained, and nothing else says why: workers are busy, and the learner waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from asyncrl.errors import HopelessRunError
from asyncrl.log_rate import is_power_of_ten
from asyncrl.rollout.rewards.failure_share import WINDOW
from asyncrl.types import DropReason

log = logging.getLogger(__name__)

NAMED = 20
"""Groups dropped in a row, by all workers of a pool together, after which the reasons are logged for the first time."""
FEWEST = 4
"""The same of one worker, however many there are: fewer in a row say nothing."""
REPEATED = 100
"""A power of ten. Logged again after this many in a row, then after ten times as many, and so on."""
HOPELESS = 1000
"""Groups dropped in a row, none of them for a fault, after which the run ends: at most one group in 300 is then trained
on (with 95 % confidence), so one step takes more samples than a hundred steps should."""
SHOWN = 400
"""Limit on the characters shown of the last failure."""
CHOSEN = frozenset({DropReason.FILTERED_ZERO_VARIANCE, DropReason.FILTERED, DropReason.OVER_LENGTH})
"""Dropped by a choice of the user; the prompts that follow may pass."""
LATE = "late"
"""Another worker has the group by now: of a slow or lost connection, so it is named and never ends a run."""
MAY_PASS = CHOSEN | {DropReason.FAILED_GENERATION, LATE}
"""No faults of what the user wrote. An engine that only fails ends its worker, see `worker.MAX_GENERATION_FAILURES`."""
ADVICE = (
    "Look at the rewards (`asyncrl data check`); take easier or harder rows, a larger rollout.group_size, or other "
    "filters"
)


class GroupOutcomes:
    """Counts the groups dropped in a row.

        outcomes = GroupOutcomes(0.5, workers=2)
        outcomes.dropped(DropReason.FAILED_REWARD, "no part `style`", size=8, row=3)   # may raise HopelessRunError
        outcomes.trained()                                                             # the server has taken one

    Args:
        max_share: `reward.max_failure_share`: faults of more than this share of 200 completions, without one group
            trained between them, end the run; so do HOPELESS groups dropped for whatever reason. 1: nothing does.
        workers: number of workers that share the load.
        where: file and line of a row.
    """

    def __init__(self, max_share: float = 1.0, *, workers: int = 1, where: Callable[[int], str] = str) -> None:
        self._max_share, self._where = max_share, where
        self._first = max(FEWEST, NAMED // workers)
        self._in_row = Counter[str]()
        self._failed = 0
        """Completions of the groups in a row that were dropped for a fault."""
        self._named = 0
        """The longest row that was logged; it is logged again at a longer one."""

    def trained(self) -> None:
        self._in_row.clear()
        self._failed = 0
        self._first = NAMED

    def dropped(self, reason: DropReason | str, detail: str, *, size: int, row: int | None = None) -> None:
        """Count a group of `size` completions that was not trained on, for a DropReason or LATE.

        Raises:
            HopelessRunError: none will be, see `max_share`.
        """
        name = str(reason.value if isinstance(reason, DropReason) else reason)
        if reason is DropReason.FILTERED:
            name += f" by {detail.partition(':')[0]:.80}"
        self._in_row[name] += 1
        self._failed += 0 if reason in MAY_PASS else size
        dropped = self._in_row.total()
        reasons = ", ".join(f"{count} {each}" for each, count in self._in_row.most_common(3))
        last = f"{' '.join(detail.split()):.{SHOWN}}"
        last = f"The last one{'' if row is None else f', row {row} ({self._where(row)})'}: {last}"
        faults = self._failed > self._max_share * WINDOW
        if self._max_share < 1 and (faults or dropped - self._in_row[LATE] >= HOPELESS):
            limit = (
                f", more than reward.max_failure_share={self._max_share:g} of {WINDOW} completions" if faults else ""
            )
            raise HopelessRunError(
                f"none of the last {dropped} groups could be trained on ({reasons}){limit}. {last}. "
                f"{ADVICE if reason in CHOSEN else 'Mend this'} and continue with resume=auto, or set "
                "reward.max_failure_share=1 to go on regardless"
            )
        due = dropped == self._first or (dropped >= REPEATED and is_power_of_ten(dropped))
        if due and dropped > self._named:
            self._named = dropped
            log.warning(
                "none of the last %d groups could be trained on (%s), and without groups there is no step. %s%s",
                dropped,
                reasons,
                last,
                f". {ADVICE}" if reason in CHOSEN else "",
            )
