"""Single completions of an evaluation, to be read: lines of `samples.jsonl` of `asyncrl eval`, and of the
`eval_samples.jsonl` of a training, which are few and have short texts since they travel with the results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asyncrl.types import NO_VERSION

MOST_SAMPLES = 64
"""Of one evaluation beside the training: with the texts below its results stay within the wire's limit of a request."""
MOST_CHARACTERS = 8192
"""Of a prompt or a completion that travels."""
MOST_PARTS, MOST_WORD = 64, 256
"""Of such a sample: parts of its reward, and characters of their names, of its source and of how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One episode of a row, or why there is none."""

    row: int
    """Of the dataset, from 0."""
    sample: int
    """From 0."""
    data_source: str = ""
    """The row's column of that name."""
    prompt: str = ""
    completion: str = ""
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    finish_reason: str = ""
    tokens: int = 0
    """Sampled."""
    version_min: int = NO_VERSION
    """The oldest version that sampled one of them, beside a training."""
    version_max: int = NO_VERSION
    """The newest one, likewise."""
    failed: str = ""
    """Why it has no reward; it is in no figure, and never counts as 0."""


def to_line(sample: Sample) -> dict[str, Any]:
    """Without what the sample does not have."""
    lacking = [name for name in ("failed", "data_source") if not getattr(sample, name)]
    lacking += ["version_min", "version_max"] if sample.version_max == NO_VERSION else []
    lacking += ["reward", "completion", "rewards", "finish_reason", "tokens"] if sample.failed else []
    return {name: value for name, value in asdict(sample).items() if name not in lacking and value != {}}


def spread(rows: int, most: int) -> frozenset[int]:
    """At most `most` of so many rows, evenly over them: files are often sorted by their source."""
    return frozenset(range(rows) if rows <= most else (rows * place // most for place in range(most)))


def for_the_wire(sample: Sample) -> Sample:
    """The same within the limits above; a text that was cut says of how much, and where."""
    return replace(
        sample,
        prompt=without_middle(sample.prompt, MOST_CHARACTERS),
        completion=without_middle(sample.completion, MOST_CHARACTERS),
        failed=without_middle(sample.failed, MOST_CHARACTERS),
        data_source=without_middle(sample.data_source, MOST_WORD),
        finish_reason=without_middle(sample.finish_reason, MOST_WORD),
        rewards=parts_for_the_wire(sample.rewards),
    )


def parts_for_the_wire(rewards: Mapping[str, float]) -> dict[str, float]:
    """The first of those that have a number and a name within the limits."""
    parts = [(name, value) for name, value in rewards.items() if len(name) <= MOST_WORD and math.isfinite(value)]
    return dict(parts[:MOST_PARTS])


def without_middle(text: str, most: int) -> str:
    """Its two ends, where it has more characters than `most`: an answer stands at the end. Half a character, of a text
    that was cut in it, becomes `?`: it has no bytes."""
    end = most // 2
    if len(text) > most:
        text = f"{text[:end]} ... ({len(text) - 2 * end} characters left out) ... {text[-end:]}"
    return text.encode(errors="replace").decode()
