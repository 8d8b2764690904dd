"""Rows of `samples.jsonl`: some completions of a step, with the policy versions that sampled them, their staleness, and
which of their tokens were trained on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from asyncrl.chat.seam import Seam
from asyncrl.data.dataset import SourceNames
from asyncrl.types import StepPlan, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

LEARNED, READ, STALE = "learned", "read", "stale"
"""State of a token of a completion: in the loss; part of an observation; or too old for the loss."""


class Samples:
    """Makes rows of `samples.jsonl`.

    Args:
        model: path of the tokenizer that decodes parts of completions. Loaded for the first completion with several.
        sources: with a mixture, maps a prompt to its source.
    """

    def __init__(self, model: str, sources: SourceNames | None = None) -> None:
        self._model, self._sources = model, sources
        self._seam: Seam | None = None
        self._missing = False

    def rows(self, plan: StepPlan, groups: Sequence[TrajectoryGroup], most: int) -> list[dict[str, Any]]:
        """Rows for the first completion of each group, then the second ...: at most `most`."""
        depth = max((len(group.trajectories) for group in groups), default=0)
        places = [(group, i) for i in range(depth) for group in groups if i < len(group.trajectories)]
        return [self._row(plan, group, i) for group, i in places[:most]]

    def _row(self, plan: StepPlan, group: TrajectoryGroup, place: int) -> dict[str, Any]:
        trajectory = group.trajectories[place]
        text = group.completion_texts[place] if place < len(group.completion_texts) else ""
        return {
            "group_id": group.group_id,
            "worker": group.worker,
            **({} if self._sources is None else {"source": self._sources[group.prompt_index]}),
            "prompt": group.prompt_text,
            "completion": text,
            "reward": trajectory.reward,
            "rewards": trajectory.rewards,
            **({"turn_rewards": trajectory.turn_rewards} if trajectory.turn_rewards else {}),
            "finish_reason": trajectory.finish_reason,
            **self._origin(plan, trajectory, text),
        }

    def _origin(self, plan: StepPlan, trajectory: Trajectory, text: str) -> dict[str, Any]:
        """Versions, staleness, and `segments` if not all tokens of the completion were trained on."""
        versions = np.unique(trajectory.policy_versions[trajectory.loss_mask]).tolist()
        if not versions:
            return {}
        ages = [plan.staleness[version] for version in versions]
        row: dict[str, Any] = {
            **{"version_min": versions[0], "version_max": versions[-1]},
            **{"staleness_min": min(ages), "staleness_max": max(ages)},
        }
        runs = fates(plan, trajectory)
        if not any(fate == LEARNED for fate, _ in runs):
            row["dropped"] = STALE
        if [fate for fate, _ in runs] == [LEARNED]:
            return row
        spelled = [text] if len(runs) == 1 else [self._spelled(ids) for _, ids in runs]
        if not self._missing:
            row["segments"] = [[fate, said] for (fate, _), said in zip(runs, spelled, strict=True)]
        return row

    def _spelled(self, ids: NDArray[np.int32]) -> str:
        if self._seam is None and not self._missing:
            try:
                self._seam = Seam(AutoTokenizer.from_pretrained(self._model, trust_remote_code=False))
            except Exception as error:  # the libraries have no narrower type (they raise a KeyError, a bare Exception)
                self._missing = True
                log.warning(
                    "samples.jsonl cannot say which parts were learned, because there is no tokenizer here: %s", error
                )
        return "" if self._seam is None else self._seam.decode(ids.tolist(), special=True)


def fates(plan: StepPlan, trajectory: Trajectory) -> list[tuple[str, NDArray[np.int32]]]:
    """Split the completion into runs of tokens with the same state: `(state, ids)` in order."""
    too_old = [version for version, age in plan.staleness.items() if age > plan.max_staleness]
    stale = np.isin(trajectory.policy_versions, too_old) & trajectory.loss_mask
    known = np.where(stale, 2, np.where(trajectory.loss_mask, 0, 1))[trajectory.prompt_length :]
    ids = trajectory.token_ids[trajectory.prompt_length :]
    cuts = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist(), len(known)]
    return [((LEARNED, READ, STALE)[known[a]], ids[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
