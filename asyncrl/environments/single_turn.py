"""One prompt, one completion, one reward."""

from __future__ import annotations

import numpy as np

from asyncrl.environments.base import Episodes, EpisodeTools
from asyncrl.errors import RewardError
from asyncrl.rewards.score import RewardScore
from asyncrl.types import NO_VERSION, Completion, Prompt, Trajectory


class SingleTurn:
    async def run(self, prompt: Prompt, size: int, tools: EpisodeTools) -> Episodes:
        completions = await tools.generate(prompt.token_ids, size)
        texts = tools.decode([completion.token_ids for completion in completions])
        scores = await tools.score(texts, prompt.columns)
        made: list[tuple[Trajectory, str]] = []
        failures: list[RewardError] = []
        for completion, text, score in zip(completions, texts, scores, strict=True):
            if isinstance(score, RewardError):
                failures.append(score)
            else:
                made.append((_trajectory(prompt, completion, score), text))
        return Episodes(
            trajectories=tuple(trajectory for trajectory, _ in made),
            texts=tuple(text for _, text in made),
            failures=tuple(failures),
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
