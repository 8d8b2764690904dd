"""Single completions of an evaluation, for people to read: the lines of `samples.jsonl` (`asyncrl eval`) and of
`eval_samples.jsonl` (during training; few, with shortened texts, because they are sent with the results)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from asyncrl.types import NO_VERSION

MOST_SAMPLES = 64
"""Samples per evaluation during training. With the limits below, its results fit into one request on the wire."""
MOST_CHARACTERS = 8192
"""Limit on the prompt and completion of a sample that is sent."""
MOST_PARTS, MOST_WORD = 64, 256
"""Limits on such a sample: reward components, and characters of their names, its source and its finish reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One episode of a row, or why there is none."""

    row: int
    """Row number in the dataset, from 0."""
    sample: int
    """Number of the sample of this row, from 0."""
    data_source: str = ""
    """The row's column of this name."""
    prompt: str = ""
    completion: str = ""
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named reward components."""
    finish_reason: str = ""
    tokens: int = 0
    """Number of sampled tokens."""
    version_min: int = NO_VERSION
    """The oldest version that sampled one of them, during training."""
    version_max: int = NO_VERSION
    """The newest such version."""
    failed: str = ""
    """Why it has no reward. Such a sample is in no metric; it never counts as 0."""


def to_line(sample: Sample) -> dict[str, Any]:
    """The sample as a dict for a JSON line, without the fields that do not apply to it."""
    lacking = [name for name in ("failed", "data_source") if not getattr(sample, name)]
    lacking += ["version_min", "version_max"] if sample.version_max == NO_VERSION else []
    lacking += ["reward", "completion", "rewards", "finish_reason", "tokens"] if sample.failed else []
    return {name: value for name, value in asdict(sample).items() if name not in lacking and value != {}}


def spread(rows: int, most: int) -> frozenset[int]:
    """At most `most` of the indices below `rows`, spread evenly, because files are often sorted by source."""
    return frozenset(range(rows) if rows <= most else (rows * place // most for place in range(most)))


def for_the_wire(sample: Sample) -> Sample:
    """The sample cut to the limits above. A shortened text says how many characters are missing, and where."""
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
    """The first `MOST_PARTS` components with a finite value and a name within the limit."""
    parts = [(name, value) for name, value in rewards.items() if len(name) <= MOST_WORD and math.isfinite(value)]
    return dict(parts[:MOST_PARTS])


def without_middle(text: str, most: int) -> str:
    """The two ends of a text longer than `most` characters (answers are at the end). A lone surrogate, which cannot be
    encoded, becomes `?`."""
    end = most // 2
    if len(text) > most:
        text = f"{text[:end]} ... ({len(text) - 2 * end} characters left out) ... {text[-end:]}"
    return text.encode(errors="replace").decode()
