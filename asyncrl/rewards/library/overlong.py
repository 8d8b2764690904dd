"""DAPO's soft overlong punishment: nothing up to a length, from there decreasing linearly to `-penalty`."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError


class Overlong:
    """`min((max_length - buffer - tokens) / buffer * penalty, 0)`, to be added to another reward.

    Args:
        max_length: length in tokens with the full penalty, usually `rollout.max_new_tokens`.
        buffer: number of tokens before it over which the penalty grows.

    Raises:
        ConfigError: the buffer is not within the length.
    """

    def __init__(self, max_length: int, buffer: int, penalty: float = 1.0) -> None:
        if not 0 < buffer <= max_length:
            raise ConfigError(f"overlong: buffer must be above 0 and at most max_length={max_length}; got {buffer}")
        self._free, self._buffer, self._penalty = max_length - buffer, buffer, penalty

    def __call__(self, completion: str, row: dict[str, Any], completion_ids: list[int]) -> float:
        return min((self._free - len(completion_ids)) / self._buffer * self._penalty, 0.0)
