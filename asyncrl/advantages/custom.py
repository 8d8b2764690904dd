"""User-defined advantages (`advantage=custom advantage.function=file.py:name`), and their check at start.

    def my_advantages(inputs: AdvantageInputs, **args) -> Tensor [N], or Tensor [N, L]

The function sees the whole step, from the headers that every rank has. Each rank calls it with the same numbers and
takes the part of its own trajectories, so the split over ranks and micro-batches cannot change the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asyncrl.errors import UserCodeError
from asyncrl.settings.advantage import AdvantageConfig
from asyncrl.user_code import called, made_once


class RewardParts(dict[str, Tensor]):
    """Parts of the reward by name; a missing one says how it is asked for."""

    def __missing__(self, name: str) -> Tensor:
        raise UserCodeError(
            f"inputs.reward_parts has no {name!r} (it has: {', '.join(self) or 'none'}). Name each part that "
            f"advantage.function needs, advantage.components.{name}=1, and have the reward return it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """All N trajectories of a step, over all ranks, in the order of its groups. float64 on the CPU."""

    rewards: Float[Tensor, " N"]
    """Rewards; with `advantage.kl_coef` minus the KL penalty of the trajectory."""
    group_ids: Int[Tensor, " N"]
    """Prompt number, from 0."""
    episode_ids: Int[Tensor, " N"]
    """Episode number, from 0. The conversations of an episode (branches) share its reward and count as one sibling."""
    lengths: Int[Tensor, " N"]
    """Number of sampled tokens."""
    fresh: Int[Tensor, " N"]
    """The last `fresh` of them are within `replay.max_staleness` and trained on; the others are not."""
    prompt_lengths: Int[Tensor, " N"]
    truncated: Bool[Tensor, " N"]
    """Whether the trajectory ended at the length limit."""
    reward_parts: Mapping[str, Float[Tensor, " N"]] = field(default_factory=RewardParts)
    """Named components that all trajectories of the step have, as the reward function returned them."""


@torch.no_grad()
def custom_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> Float[Tensor, "N L"]:
    """The advantage of each sampled token of each trajectory; one column if all tokens of a trajectory share one.

    Raises:
        ConfigError: it cannot be loaded, or does not take `advantage.args`.
        UserCodeError: the function raised, or its result is not a valid tensor of advantages.
    """
    named = f"advantage.function={config.function}"
    # A copy that the function may modify: `inputs.lengths` is still needed below.
    function = made_once(config.function, config.args, "advantage.function")
    found = called(function, named, copy.deepcopy(inputs))
    count, longest = len(inputs.rewards), int(inputs.lengths.max()) if len(inputs.lengths) else 0
    shapes = ((count,), (count, longest))
    if not isinstance(found, Tensor) or tuple(found.shape) not in shapes:
        said = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UserCodeError(
            f"{named} must return a tensor of one number per trajectory, [{count}], or one per sampled token, "
            f"[{count}, {longest}] (the longest of inputs.lengths); got {said}"
        )
    table = found.double().cpu()
    table = table[:, None] if table.ndim == 1 else table
    inside = torch.arange(table.shape[1]) < inputs.lengths[:, None] if found.ndim == 2 else torch.ones_like(table) > 0
    if not bool(table[inside].isfinite().all()):
        row = int((~table.isfinite() & inside).any(1).nonzero()[0])
        raise UserCodeError(
            f"{named} gave {table[row].tolist()[:4]} for trajectory {row} (reward {float(inputs.rewards[row])}): an "
            "advantage must be finite. Mind divisions by the spread of a group whose rewards are all the same"
        )
    return table


def try_advantages(config: AdvantageConfig) -> None:
    """Call the function twice on a synthetic step, in which all rewards of one group are the same.

    Raises:
        ConfigError: it cannot be loaded. UserCodeError: it raises, or its results are invalid or differ.
    """
    inputs = made_up(config.components)
    first, second = custom_advantages(inputs, config), custom_advantages(inputs, config)
    if not torch.equal(first, second):
        raise UserCodeError(
            f"advantage.function={config.function} gave different advantages for the same step. Each rank calls it by "
            "itself, and they must agree: use no chance, clock or state of its own"
        )


def made_up(parts: Mapping[str, float]) -> AdvantageInputs:
    """A synthetic step: three groups of two; one trajectory is truncated, and one has a part that is too old."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, -1.0, 2.0], dtype=torch.float64)
    lengths = torch.tensor([3, 7, 1, 4, 5, 2])
    return AdvantageInputs(
        rewards=rewards,
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        episode_ids=torch.arange(6),
        lengths=lengths,
        fresh=torch.tensor([3, 5, 1, 4, 5, 2]),
        prompt_lengths=torch.tensor([4, 4, 6, 6, 2, 2]),
        truncated=torch.tensor([False, True, False, False, False, False]),
        reward_parts=RewardParts({name: rewards / (place + 1) for place, name in enumerate(parts)}),
    )
