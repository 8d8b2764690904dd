"""Tasks of reasoning-gym by name. Only processes that score or write rows import this: its import takes seconds, and
its scorers evaluate text that a model wrote."""

from __future__ import annotations

import functools
import json
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from asyncrl.errors import ConfigError

KEPT = 256
"""Number of data sets that are cached."""


COMPOSED = "composite"
"""Task composed of others, which its config names; it needs one."""


def names() -> list[str]:
    """Names of all tasks that need no config."""
    return sorted(set(DATASETS) - {COMPOSED})


def entry_of(task: str, seed: int, size: int, index: int, config: str = "{}") -> dict[str, Any]:
    """Generate the question, its answer and what the scorer needs: a pure function of the arguments.

    Raises:
        ConfigError: there is no such task, or not with this config.
    """
    return _dataset(task, seed, size, config)[index]


def score(task: str, seed: int, size: int, index: int, config: str, reply: str, tagged: bool) -> float:
    """Return the task's score of a reply, 0 to 1.

    Args:
        config: settings of the task, as JSON.
        tagged: the answer is between <answer> and </answer>; without them there is none.
    """
    answer = extract_answer(reply) if tagged else reply.strip()
    dataset = _dataset(task, seed, size, config)
    return float(dataset.score_answer(answer=answer, entry=dataset[index]))


@functools.lru_cache(KEPT)
def _dataset(task: str, seed: int, size: int, config: str) -> Any:
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}. It has: {', '.join(names())}")
    try:
        return create_dataset(task, seed=seed, size=size, **json.loads(config))
    # Each task checks its own settings, with assertions and errors of many kinds.
    except Exception as error:
        raise ConfigError(f"reasoning-gym's task {task} cannot be created with {config}: {error}") from error
