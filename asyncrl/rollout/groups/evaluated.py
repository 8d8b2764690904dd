"""The evaluation sets during training: their rows, and how and how often each row is sampled."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.data.prompts import PromptSource
from asyncrl.environments.base import Episodes
from asyncrl.errors import DataError
from asyncrl.evaluation.answers import answer_of
from asyncrl.evaluation.samples import Sample, for_the_wire
from asyncrl.evaluation.table import OF_SOURCE, RowScores, figures_of
from asyncrl.types import Prompt, SamplingParams, members_of

MOST_SOURCES = 16
"""Limit on the sources of a set that have means of their own, so that there is no metric per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    rows: PromptSource
    """The rows, in the order of the file."""
    sampling: SamplingParams
    samples: int = 1
    """Completions per row."""
    pass_score: float = 1.0
    answer: str = "none"
    """As the setting `eval.answer`."""
    sources: tuple[str, ...] = ()
    """The `data_source` of each evaluated row, as made by `told_apart`."""
    kept: frozenset[int] = frozenset()
    """Rows whose first sample is written to `eval_samples.jsonl`."""

    def figures(self, made: Sequence[Episodes], first: int = 0) -> dict[str, tuple[float | None, ...]]:
        """Metrics of rows from `first` on, as in `EvalResult.figures`: of several samples, and `DATA_SOURCE/mean`."""
        found: list[dict[str, float]] = []
        for row, episodes in enumerate(made):
            if not episodes.trajectories:
                continue
            found.append({} if self.samples == 1 else self._of_row(row, episodes))
            if first + row < len(self.sources) and (name := self.sources[first + row]):
                found[-1][f"{name}{OF_SOURCE}"] = float(np.mean([each.reward for each in episodes.members]))
        names = dict.fromkeys(name for of_row in found for name in of_row)
        return {name: tuple(of_row.get(name) for of_row in found) for name in names}

    def samples_kept(self, made: Sequence[Episodes], first: int = 0) -> tuple[Sample, ...]:
        """Samples of rows from `first` on, one for each row in `kept`: its first with a score, else its failure."""
        found: list[Sample] = []
        for row, episodes in enumerate(made, start=first):
            if row in self.kept:
                sampled = [each.policy_versions[each.loss_mask] for each in episodes.trajectories[:1]]
                versions = sampled[0].tolist() if sampled else []
                known = {"version_min": min(versions), "version_max": max(versions)} if versions else {}
                found += [
                    replace(for_the_wire(each), **known) for each in samples_of(row, self._prompt(row), episodes)[:1]
                ]
        return tuple(found)

    def _prompt(self, row: int) -> Prompt | None:
        try:
            return self.rows[row]
        except DataError:  # an unusable row: its episodes say why
            return None

    def _of_row(self, row: int, episodes: Episodes) -> dict[str, float]:
        scores = tuple(trajectory.reward for trajectory in episodes.members)
        texts = () if self.answer == "none" else (episodes.texts[at] for at in members_of(episodes.trajectories))
        answers = tuple(answer_of(text, self.answer) for text in texts)
        given = RowScores(row=row, scores=scores, answers=answers)
        return figures_of(given, samples=self.samples, pass_score=self.pass_score)


def told_apart(sources: Iterable[str], rows: int) -> tuple[str, ...]:
    """`EvaluatedSet.sources` of the first `rows` rows (0: all), as metric names; empty for one source or too many."""
    given = tuple(itertools.islice(sources, rows or None))
    found, names = dict.fromkeys(given), dict[str, str]()
    if not 1 < len(found) <= MOST_SOURCES:
        return ()
    for each in found:
        name = re.sub(r"[^\w.-]", "_", each)
        while name in names.values():
            name += "_"
        names[each] = name
    return tuple(names[each] for each in given)


def samples_of(row: int, prompt: Prompt | None, made: Episodes) -> list[Sample]:
    """Samples of one row: finished completions first, then failures.

    Args:
        prompt: None if the row cannot be used.
    """
    text = made.prompt_text or ("" if prompt is None else prompt.text)
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
