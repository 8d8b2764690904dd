"""One prompt, one completion, one reward."""

from __future__ import annotations

import numpy as np

from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.rewards.score import RewardScore
from asyncrl.types import NO_VERSION, Completion, Prompt, Trajectory


class SingleTurn:
    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        completions = await tools.generate(prompt.token_ids, size)
        texts = tools.decode([completion.token_ids for completion in completions])
        scores = await tools.score(texts, prompt.columns)
        pairs = zip(completions, scores, strict=True)
        return Episodes(
            trajectories=tuple(_trajectory(prompt, completion, score) for completion, score in pairs),
            texts=tuple(texts),
        )


def _trajectory(prompt: Prompt, completion: Completion, score: RewardScore) -> Trajectory:
    start = len(prompt.token_ids)
    length = start + len(completion.token_ids)
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[start:] = True
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[start:] = completion.logprobs
    versions = np.full(length, NO_VERSION, dtype=np.int32)
    versions[start:] = completion.policy_versions
    return Trajectory(
        token_ids=np.concatenate((prompt.token_ids, completion.token_ids), dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        policy_versions=versions,
        reward=score.value,
        rewards=score.parts,
        finish_reason=completion.finish_reason,
    )
