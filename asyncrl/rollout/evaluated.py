"""What is evaluated beside the training: rows, and how often and how each is sampled."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.data.prompts import PromptSource
from asyncrl.environments.base import Episodes
from asyncrl.evaluation.answers import answer_of
from asyncrl.evaluation.table import RowScores, figures_of
from asyncrl.types import SamplingParams, members_of

MOST_SOURCES = 16
"""Of a set, that have means of their own: where each row has another `data_source` there would be a metric per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedSet:
    rows: PromptSource
    """In the order of the file."""
    sampling: SamplingParams
    samples: int = 1
    """Of each row."""
    pass_score: float = 1.0
    answer: str = "none"
    """As `eval.answer`."""
    sources: tuple[str, ...] = ()
    """The `data_source` of each row that is evaluated, as in `told_apart`."""

    def figures(self, made: Sequence[Episodes], first: int = 0) -> tuple[dict[str, float], dict[str, float]]:
        """Of rows from `first` on: of several samples sums of the figures over those that have enough of them, and how
        many have; and `DATA_SOURCE/mean` of the rows that have a score."""
        sums, known = Counter[str](), Counter[str]()
        for row, episodes in enumerate(made):
            found = {} if self.samples == 1 else self._of_row(row, episodes)
            if episodes.trajectories and first + row < len(self.sources) and (name := self.sources[first + row]):
                found[f"{name}/mean"] = float(np.mean([each.reward for each in episodes.members]))
            sums.update(found)  # pyright: ignore[reportArgumentType]  # it adds floats as well
            known.update(dict.fromkeys(found, 1))
        return dict(sums), {name: float(count) for name, count in known.items()}

    def _of_row(self, row: int, episodes: Episodes) -> dict[str, float]:
        scores = tuple(trajectory.reward for trajectory in episodes.members)
        texts = () if self.answer == "none" else (episodes.texts[at] for at in members_of(episodes.trajectories))
        answers = tuple(answer_of(text, self.answer) for text in texts)
        given = RowScores(row=row, scores=scores, answers=answers)
        return figures_of(given, samples=self.samples, pass_score=self.pass_score)


def told_apart(sources: Iterable[str], rows: int) -> tuple[str, ...]:
    """`EvaluatedSet.sources` of the first `rows` (0: all), as names of metrics have them; empty of one, or too many."""
    names = tuple(re.sub(r"[^\w.-]", "_", each, flags=re.ASCII) for each in itertools.islice(sources, rows or None))
    return names if 1 < len(set(names)) <= MOST_SOURCES else ()
