"""What is evaluated beside the training: rows, and how often and how each is sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.data.prompts import PromptSource
from asyncrl.environments.base import Episodes
from asyncrl.evaluation.answers import answer_of
from asyncrl.evaluation.table import RowScores, figures_of
from asyncrl.types import SamplingParams, members_of


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

    def figures(self, made: Sequence[Episodes]) -> tuple[dict[str, float], dict[str, float]]:
        """Of rows with several samples: sums of the figures over those that have enough of them, and how many have."""
        sums, known = Counter[str](), Counter[str]()
        for row, episodes in enumerate(made):
            found = {} if self.samples == 1 else self._of_row(row, episodes)
            sums.update(found)  # pyright: ignore[reportArgumentType]  # it adds floats as well
            known.update(dict.fromkeys(found, 1))
        return dict(sums), {name: float(count) for name, count in known.items()}

    def _of_row(self, row: int, episodes: Episodes) -> dict[str, float]:
        scores = tuple(trajectory.reward for trajectory in episodes.members)
        texts = () if self.answer == "none" else (episodes.texts[at] for at in members_of(episodes.trajectories))
        answers = tuple(answer_of(text, self.answer) for text in texts)
        given = RowScores(row=row, scores=scores, answers=answers)
        return figures_of(given, samples=self.samples, pass_score=self.pass_score)
