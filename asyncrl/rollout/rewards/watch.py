"""Ends a run whose reward can never work: groups that all fail are dropped, and no step would ever be trained.

consumes: the result of each completion made for training · waits for: nothing
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from asyncrl.errors import AsyncRLError, EpisodeError, HopelessRewardError, RewardError
from asyncrl.log_rate import is_power_of_ten
from asyncrl.rollout.rewards.failure_share import FailureShare

log = logging.getLogger(__name__)

SHOWN = 400
"""Limit on the characters shown of the last failure."""


class RewardWatch:
    """Counts completions without a reward, by reason. Evaluations are not counted; groups that a filter drops do have
    rewards; and a failed generation is not a fault of the reward.

    Args:
        max_share: `reward.max_failure_share`.
        where: file and line of a row.
    """

    def __init__(self, max_share: float = 1.0, where: Callable[[int], str] = str) -> None:
        self._share, self._where = FailureShare(max_share), where
        self._scored, self._reasons = 0, Counter[str]()

    def saw(self, row: int, scored: int, failures: Sequence[AsyncRLError]) -> None:
        """Record the completions of one row: `scored` have a reward, the others failed.

        Raises:
            HopelessRewardError: more than `max_share` of the last 200 have failed.
        """
        blamed = [error for error in failures if isinstance(error, RewardError | EpisodeError)]
        self._scored += scored
        for error in blamed:
            self._reasons[_reason(error)] += 1
            if isinstance(error, EpisodeError):  # of a reward's the pool has told
                self._tell(row, error)
        if too_many := self._share.add(scored, len(blamed)):
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
            raise HopelessRewardError(
                f"there was no reward {too_many} (since the start: {reasons}). The last one, row {row} "
                f"({self._where(row)}): {_said(blamed[-1])}. Fix the reward or the data and continue with resume=auto, "
                "or raise reward.max_failure_share"
            )

    def _tell(self, row: int, error: EpisodeError) -> None:
        count = self._reasons[_reason(error)]
        if is_power_of_ten(count):
            log.warning("failed episode %d, row %d (%s): %s", count, row, self._where(row), _said(error))

    def stats(self) -> dict[str, float]:
        """Counts of completions so far."""
        by_reason = {f"rewards_failed_{reason}": float(count) for reason, count in self._reasons.items()}
        return {"rewards_scored": float(self._scored), "rewards_failed": float(self._reasons.total())} | by_reason


def _said(error: RewardError | EpisodeError) -> str:
    return f"{' '.join(str(error).split()):.{SHOWN}}"


def _reason(error: RewardError | EpisodeError) -> str:
    return error.reason if isinstance(error, RewardError) else "environment"
