"""Reads and writes `samples.jsonl` of an evaluation: one line per sample; all samples of a row in one write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from asyncrl.evaluation.answers import answer_of
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluation.table import RowScores

NAMES = {each.name for each in fields(Sample)}
TEXTS = ("data_source", "prompt", "completion", "finish_reason", "failed")


def by_row(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[Sample]]:
    """Row -> its samples, by number. If a row was tried again, the newest samples count. Invalid lines are skipped."""
    found: dict[int, dict[int, Sample]] = {}
    for sample in (Sample(**line) for line in lines if is_sample(line)):
        found.setdefault(sample.row, {})[sample.sample] = sample
    return {row: [samples[number] for number in sorted(samples)] for row, samples in sorted(found.items())}


def is_sample(line: Mapping[str, Any]) -> bool:
    """Whether a line is what `to_line` writes, undamaged."""
    numbers = isinstance(line.get("row"), int) and isinstance(line.get("sample"), int)
    scored = line.get("reward") is None or isinstance(line["reward"], int | float)
    return numbers and scored and line.keys() <= NAMES and all(isinstance(line.get(name, ""), str) for name in TEXTS)


def is_done(samples: Iterable[Sample], wanted: int) -> bool:
    """Whether a row is complete: it has all its samples, and none failed."""
    scored = [sample for sample in samples if not sample.failed]
    return len(scored) == wanted


def scores_of(row: int, samples: Iterable[Sample], extract: str) -> RowScores:
    """The scores of a row, for the table.

    Args:
        extract: how to find an answer, see `asyncrl.evaluation.answers`; `none` counts no votes.
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
