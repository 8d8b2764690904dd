"""`samples.jsonl` of an evaluation: one line per sample, all of a row in one write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.environments.base import Episodes
from asyncrl.evaluation.answers import answer_of
from asyncrl.evaluation.table import RowScores
from asyncrl.types import Prompt, members_of


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
    failed: str = ""
    """Why it has no reward; it is in no figure, and never counts as 0."""


def samples_of(row: int, prompt: Prompt | None, made: Episodes) -> list[Sample]:
    """Of one row: what came to its end, then what failed.

    Args:
        prompt: None where the row cannot be used.
    """
    text = "" if prompt is None else prompt.text
    source = "" if prompt is None else prompt.columns.get("data_source", "")
    known: dict[str, Any] = {"row": row, "data_source": str(source), "prompt": text}
    scored = [
        Sample(
            **known,
            sample=place,
            completion=made.texts[first],
            reward=made.trajectories[first].reward,
            rewards=dict(made.trajectories[first].rewards),
            finish_reason=made.trajectories[first].finish_reason,
            tokens=int(made.trajectories[first].loss_mask.sum()),
        )
        for place, first in enumerate(members_of(made.trajectories))
    ]
    return scored + [
        Sample(**known, sample=place, failed=f"{type(failure).__name__}: {failure}")
        for place, failure in enumerate(made.failures, start=len(scored))
    ]


def to_line(sample: Sample) -> dict[str, Any]:
    """Without what the sample does not have."""
    lacking = [name for name in ("failed", "data_source") if not getattr(sample, name)]
    lacking += ["reward", "completion", "rewards", "finish_reason", "tokens"] if sample.failed else []
    return {name: value for name, value in asdict(sample).items() if name not in lacking and value != {}}


def by_row(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[Sample]]:
    """Row -> its samples, by number. Of a row that was tried again the newest count."""
    found: dict[int, dict[int, Sample]] = {}
    for line in lines:
        sample = Sample(**line)
        found.setdefault(sample.row, {})[sample.sample] = sample
    return {row: [samples[number] for number in sorted(samples)] for row, samples in sorted(found.items())}


def is_done(samples: Iterable[Sample], wanted: int) -> bool:
    """Whether a row needs no other try: all its samples are there, and none has failed."""
    scored = [sample for sample in samples if not sample.failed]
    return len(scored) == wanted


def scores_of(row: int, samples: Iterable[Sample], extract: str) -> RowScores:
    """For the table.

    Args:
        extract: how an answer is found, see `asyncrl.evaluation.answers`; `none` counts no votes.
    """
    samples = list(samples)
    scored = [(sample, sample.reward) for sample in samples if sample.reward is not None]
    votes = extract != "none"
    return RowScores(
        row=row,
        data_source=next((sample.data_source for sample in samples if sample.data_source), ""),
        scores=tuple(reward for _, reward in scored),
        answers=tuple(answer_of(sample.completion, extract) for sample, _ in scored) if votes else (),
        failed=len(samples) - len(scored),
    )
