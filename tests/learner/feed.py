"""Synthetic groups, plans and leases, and tiny models, for the tests of the learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.balance import shard_step
from asyncrl.replay.protocol import Lease
from asyncrl.types import (
    GREEDY_REWARD,
    NO_VERSION,
    GroupHeader,
    StepPlan,
    Trajectory,
    TrajectoryGroup,
    TrajectoryHeader,
    turns_in,
)

VOCABULARY = 264
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
}
MIXTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
"""Mixtures of experts. They cannot run in float64, which torch's grouped matrix product does not support, and have
adapters of the attention alone."""


def tiny_model(family: str = "qwen2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a model with large initial weights: different weights or masks then give clearly different log-probs."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    config_class, model_class, own = (FAMILIES | MIXTURES)[family]
    torch.manual_seed(seed)
    return model_class(config_class(**(settings | own | changes)))


def tiny_checkpoint(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    tiny_model(family, **changes).save_pretrained(folder)
    return folder


def make_group(
    rng: np.random.Generator,
    group_id: int,
    *,
    size: int,
    versions: tuple[int, ...],
    longest: int = 12,
    observed: bool = False,
) -> TrajectoryGroup:
    """Return a prompt with `size` completions, whose tokens are of `versions`, oldest first, in random runs.

    With `observed`, some tokens of a completion are observations between its turns.
    """
    prompt = rng.integers(0, 256, rng.integers(2, 8))
    trajectories = []
    for _ in range(size):
        completion = rng.integers(0, 256, rng.integers(1, longest))
        mask = np.concatenate([np.zeros(len(prompt), bool), np.ones(len(completion), bool)])
        stamps = np.full(len(mask), NO_VERSION, np.int32)
        if observed:
            mask[len(prompt) + 2 : -1 : 4] = False
        stamps[mask] = np.sort(rng.choice(versions, int(mask.sum())))
        logprobs = np.where(mask, -rng.uniform(0.1, 6.0, len(mask)), 0.0)
        trajectories.append(
            Trajectory(
                token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=logprobs.astype(np.float32),
                policy_versions=stamps,
                reward=float(rng.integers(0, 2)),
                rewards={"short": 1.0 / len(completion), GREEDY_REWARD: group_id % 3 / 2},
                finish_reason="length" if len(completion) == longest - 1 else "stop",
            )
        )
    texts = tuple(f"completion {i}" for i in range(size))
    return TrajectoryGroup(
        group_id=group_id,
        prompt_index=group_id,
        attempt=0,
        worker="w0",
        trajectories=tuple(trajectories),
        prompt_text=f"prompt {group_id}",
        completion_texts=texts,
    )


def header_of(group: TrajectoryGroup) -> GroupHeader:
    return GroupHeader(
        group_id=group.group_id,
        prompt_index=group.prompt_index,
        attempt=group.attempt,
        worker=group.worker,
        trajectories=tuple(_trajectory_header(trajectory) for trajectory in group.trajectories),
    )


def _trajectory_header(trajectory: Trajectory) -> TrajectoryHeader:
    stamps = trajectory.policy_versions[trajectory.loss_mask]
    versions, counts = np.unique(stamps, return_counts=True)
    return TrajectoryHeader(
        length=len(trajectory.token_ids),
        prompt_length=trajectory.prompt_length,
        reward=trajectory.reward,
        version_tokens=tuple(zip(versions.tolist(), counts.tolist(), strict=True)),
        rewards=trajectory.rewards,
    )


def make_step(
    seed: int,
    *,
    groups: int = 4,
    size: int = 4,
    world: int = 1,
    step: int = 0,
    max_staleness: int = 2,
    oldest: int = 4,
    observed: bool = False,
) -> tuple[StepPlan, list[TrajectoryGroup]]:
    """Return a sealed step at version 10 with tokens of versions 10 - oldest ... 10, some beyond `max_staleness`."""
    rng = np.random.default_rng(seed)
    versions = tuple(range(10 - oldest, 11))
    members = [make_group(rng, 100 * step + i, size=size, versions=versions, observed=observed) for i in range(groups)]
    plan = StepPlan(
        step=step,
        policy_version=10,
        groups=tuple(header_of(group) for group in members),
        staleness={version: 10 - version for version in versions},
        max_staleness=max_staleness,
        shards=(),
    )
    return replace(plan, shards=shard_step(plan, world)), members


def make_lease(plan: StepPlan, groups: list[TrajectoryGroup], rank: int = 0, samples: int = 0) -> Lease:
    return Lease(
        plan=plan,
        trajectories={(g, t): groups[g].trajectories[t] for g, t in plan.shards[rank]},
        samples=tuple(groups[:samples]),
    )


def turned_step(seed: int, told: float = 1.0) -> Lease:
    """Return a lease with trajectories of several turns, some of them too stale.

    Args:
        told: share of the trajectories that have rewards of their turns.
    """
    plan, groups = make_step(seed, groups=5, observed=True)
    rng = np.random.default_rng(seed)
    made = []
    for g, group in enumerate(groups):
        turned = tuple(
            replace(each, turn_rewards=tuple(rng.normal(size=turns_in(each.loss_mask)).tolist()))
            if rng.random() < told
            else each
            for each in group.trajectories
        )
        made.append(replace(group, trajectories=turned))
        headers = tuple(
            replace(header, turn_rewards=each.turn_rewards)
            for header, each in zip(plan.groups[g].trajectories, turned, strict=True)
        )
        plan = replace(
            plan, groups=(*plan.groups[:g], replace(plan.groups[g], trajectories=headers), *plan.groups[g + 1 :])
        )
    return make_lease(plan, made)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradient, [P], of all parameters that have one."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
