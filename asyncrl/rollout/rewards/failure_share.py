"""The rule of `reward.max_failure_share`, for all code of the user that judges completions: rewards and filters."""

from __future__ import annotations

from collections import deque

WINDOW = 200
"""Completions that the share is taken over."""


class FailureShare:
    """Which of the last completions failed.

    Args:
        most: `reward.max_failure_share`.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._failed: deque[bool] = deque(maxlen=WINDOW)

    def add(self, good: int, failed: int) -> str:
        """Of completions that were judged: so many are well, so many failed.

        Returns:
            Empty, or by how much the failures are more than the settings allow: as soon as successes could no longer
            bring the share of 200 below.
        """
        self._failed.extend([False] * good + [True] * failed)
        count = sum(self._failed)
        if not failed or count <= self._most * WINDOW:
            return ""
        return (
            f"for {count} of the last {len(self._failed)} completions, more than "
            f"reward.max_failure_share={self._most:g} of {WINDOW}"
        )
