"""Builds one trajectory: the prompt, then alternately what the policy sampled and what the environment answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rewards.score import RewardScore
from asyncrl.types import NO_VERSION, ROUTED_EXPERTS, Completion, Prompt, Trajectory


class Transcript:
    """Keeps ids as they were sampled, and aligns masks, log-probs and versions with them.

    Example: `add_completion`, `add_observation`, `add_completion`::

        token_ids  [prompt | sampled | observation | sampled]
        loss_mask  [   0   |    1    |      0      |    1   ]
    """

    def __init__(self, prompt: Prompt | Sequence[int] | NDArray[np.int32]) -> None:
        self._ids = [np.asarray(prompt.token_ids if isinstance(prompt, Prompt) else prompt, np.int32)]
        self._completions: list[Completion | None] = [None]
        """Completion of each part; None if no policy sampled it."""
        self._rewards: dict[int, float] = {}
        """Rewards by the part after which they were given."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T] all tokens so far: the prompt of the next turn."""
        return np.concatenate(self._ids)

    @property
    def prompt_length(self) -> int:
        return len(self._ids[0])

    @property
    def sampled(self) -> bool:
        """Whether there is a token that can be trained on."""
        return any(completion is not None and len(completion.token_ids) for completion in self._completions)

    def add_completion(self, completion: Completion) -> None:
        """Add a sampled turn. Raises ValueError if the learner could not compute its log-probs."""
        if not completion.trainable:
            raise ValueError(
                "this completion was sampled at another temperature than rollout.temperature, at which the learner "
                "computes log-probs, so it cannot be trained on. Add its token_ids as an observation"
            )
        self._ids.append(completion.token_ids)
        self._completions.append(completion)

    def add_observation(self, token_ids: NDArray[np.int32] | Sequence[int]) -> None:
        """Add [N] tokens that the policy reads and is not trained on. Raises ValueError if they are not token ids."""
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"an observation must be token ids [N]; got {ids.dtype}{list(ids.shape)}")
        self._ids.append(ids.astype(np.int32))
        self._completions.append(None)

    @property
    def parts(self) -> int:
        """Number of prompt, completions and observations so far."""
        return len(self._ids)

    def reward(self, value: float, parts: int | None = None) -> None:
        """Add what the policy's last turn earned: it is included in the score of the trajectory, not added to it.

        Args:
            parts: number of parts after that turn, if it is not the last one.
        """
        at = (parts or self.parts) - 1
        self._rewards[at] = self._rewards.get(at, 0.0) + float(value)

    def _turn_rewards(self, turns: Sequence[float]) -> tuple[float, ...]:
        """[turns] rewards, or empty, including those of the score. A reward after a turn that is not trained on goes to
        the last trained turn before it; if there is none, to the first."""
        rewards = dict(self._rewards)
        said = [at for at, completion in enumerate(self._completions) if completion is not None]
        for at, value in zip(said, turns, strict=True) if turns else ():
            rewards[at] = rewards.get(at, 0.0) + value
        if not rewards:
            return ()
        earned: list[float] = []
        early, inside = 0.0, False
        for at, (ids, completion) in enumerate(zip(self._ids, self._completions, strict=True)):
            if len(ids):
                if completion is not None and not inside:
                    earned.append(0.0)
                inside = completion is not None
            if earned:
                earned[-1] += rewards.get(at, 0.0)
            else:
                early += rewards.get(at, 0.0)
        return (earned[0] + early, *earned[1:]) if earned else ()

    def trajectory(
        self,
        score: RewardScore | float,
        *,
        truncated: bool = False,
        branch: bool = False,
        extras: Mapping[str, NDArray[Any]] | None = None,
    ) -> Trajectory:
        """Return the trajectory of all turns, with their total reward.

        Raises ValueError for a score with rewards of another number of turns.

        Args:
            truncated: the end of the context cut the episode; a last turn that was cut is detected without it.
            branch: see `Trajectory`.
            extras: in addition to those that the engine recorded.
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
            turn_rewards=self._turn_rewards(score.turns if scored else ()),
            finish_reason="length" if truncated else finish_reason,
            extras={**self._recorded(), **(extras or {})},
            branch=branch,
        )

    def _recorded(self) -> dict[str, NDArray[Any]]:
        """Data that the engine recorded for all sampled turns."""
        turns = [completion.recorded for completion in self._completions if completion is not None]
        joined = {
            name: np.concatenate([turn[name] for turn in turns])
            for name in (turns[0] if turns else ())
            # Data missing in one turn is left out for all; if the learner needs it, the worker reports it.
            if all(name in turn for turn in turns) and name != ROUTED_EXPERTS
        }
        return joined | self._routed()

    def _routed(self) -> dict[str, NDArray[Any]]:
        """`ROUTED_EXPERTS` of every token at the time the following token was sampled. A later turn reads the earlier
        ones again, perhaps with newer weights: its routing of those is left out."""
        rows: list[NDArray[Any]] = []
        start = told = 0
        for ids, completion in zip(self._ids, self._completions, strict=True):
            start += len(ids)
            if completion is None or not len(ids):
                continue
            given = completion.recorded.get(ROUTED_EXPERTS)
            if given is None or len(given) != start - 1:  # it was generated from another prompt
                return {}
            rows.append(given[told:])
            told = start - 1
        return {ROUTED_EXPERTS: np.concatenate(rows)} if rows else {}
