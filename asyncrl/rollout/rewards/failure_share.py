"""The rule of `reward.max_failure_share`, for user code that judges completions: rewards and filters."""

from __future__ import annotations

from collections import deque

WINDOW = 200
"""Number of last completions that the share is computed over."""


class FailureShare:
    """Tracks which of the last completions failed.

    Args:
        most: `reward.max_failure_share`.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._failed: deque[bool] = deque(maxlen=WINDOW)

    def add(self, good: int, failed: int) -> str:
        """Record `good` successful and `failed` failed completions.

        Returns:
            Empty, or a text saying that failures exceed the limit: as soon as successes can no longer bring the share
                of 200 completions below it.
        """
        self._failed.extend([False] * good + [True] * failed)
        count = sum(self._failed)
        if not failed or count <= self._most * WINDOW:
            return ""
        return (
            f"for {count} of the last {len(self._failed)} completions, more than "
            f"reward.max_failure_share={self._most:g} of {WINDOW}"
        )
