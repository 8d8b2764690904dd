"""One trajectory in the making: the prompt, then in turn what the policy sampled and what the environment answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rewards.score import RewardScore
from asyncrl.types import NO_VERSION, Completion, Prompt, Trajectory


class Transcript:
    """Keeps ids as they were sampled, and masks, log-probs and versions in step with them.

    Example: `add_completion`, `add_observation`, `add_completion`::

        token_ids  [prompt | sampled | observation | sampled]
        loss_mask  [   0   |    1    |      0      |    1   ]
    """

    def __init__(self, prompt: Prompt | Sequence[int] | NDArray[np.int32]) -> None:
        self._ids = [np.asarray(prompt.token_ids if isinstance(prompt, Prompt) else prompt, np.int32)]
        self._completions: list[Completion | None] = [None]
        """Of each part; None where no policy sampled it."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T] all so far: what the next turn is generated from."""
        return np.concatenate(self._ids)

    @property
    def prompt_length(self) -> int:
        return len(self._ids[0])

    @property
    def sampled(self) -> bool:
        """Whether there is a token that can be trained on."""
        return any(completion is not None and len(completion.token_ids) for completion in self._completions)

    def add_completion(self, completion: Completion) -> None:
        """Raises ValueError when the learner could not compute its log-probs."""
        if not completion.trainable:
            raise ValueError(
                "this completion was sampled at another temperature than the run's, and the learner's log-probs are "
                "those at rollout.temperature: it cannot be trained on. Add its token_ids as an observation"
            )
        self._ids.append(completion.token_ids)
        self._completions.append(completion)

    def add_observation(self, token_ids: NDArray[np.int32] | Sequence[int]) -> None:
        """[N] tokens that the policy reads and is not trained on. Raises ValueError when they are none."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"an observation is token ids [N]; {ids.dtype}{list(ids.shape)} came")
        self._ids.append(ids.astype(np.int32))
        self._completions.append(None)

    def trajectory(
        self,
        score: RewardScore | float,
        *,
        truncated: bool = False,
        branch: bool = False,
        extras: Mapping[str, NDArray[Any]] | None = None,
    ) -> Trajectory:
        """All turns with their one reward.

        Args:
            truncated: the context's end cut it; a last turn that was cut says so by itself.
            branch: see `Trajectory`.
        """
        token_ids = self.token_ids
        loss_mask = np.zeros(len(token_ids), np.bool_)
        logprobs = np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), NO_VERSION, np.int32)
        finish_reason, stop = "stop", 0
        for ids, completion in zip(self._ids, self._completions, strict=True):
            start, stop = stop, stop + len(ids)
            if completion is not None:
                loss_mask[start:stop] = True
                logprobs[start:stop] = completion.logprobs
                versions[start:stop] = completion.policy_versions
                finish_reason = completion.finish_reason
        scored = isinstance(score, RewardScore)
        return Trajectory(
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            policy_versions=versions,
            reward=score.value if scored else float(score),
            rewards=score.parts if scored else {},
            finish_reason="length" if truncated else finish_reason,
            extras=extras or {},
            branch=branch,
        )
