"""Batches, advantages and losses: parts that do not fit together or would do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.checks.problem import Problems
from asyncrl.errors import ConfigError
from asyncrl.losses.config import check_loss, required_inputs

if TYPE_CHECKING:
    from asyncrl.config import Config


def groups_have_siblings(config: Config) -> Problems:
    relative = config.advantage.baseline in ("mean", "loo") or config.advantage.std == "group"
    if relative and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size must be at least 2 when advantages are relative to the group (advantage.baseline="
            f"{config.advantage.baseline}, advantage.std={config.advantage.std}): a single trajectory's advantage is "
            f"always 0; got {config.rollout.group_size}. Raise it, or set advantage.baseline=none"
        )


def batch_divides(config: Config) -> Problems:
    groups, updates = config.learner.groups_per_step, config.learner.updates_per_batch
    if updates < 1 or config.learner.ranks < 1:
        return  # refused by numbers_in_range
    if groups % updates:
        fits = [str(n) for n in range(1, groups + 1) if groups % n == 0]
        yield (
            f"learner.groups_per_step must be a multiple of learner.updates_per_batch, so that each update gets whole "
            f"groups and an equal share; got {groups} and {updates}. {groups} divides by {', '.join(fits[:12])}"
        )
    sequences = groups * config.rollout.group_size // updates
    if sequences < config.learner.ranks:
        yield (
            f"every rank needs a sequence in every update: learner.groups_per_step * rollout.group_size / "
            f"learner.updates_per_batch = {sequences} is less than learner.ranks={config.learner.ranks}. Raise "
            "learner.groups_per_step, or use fewer ranks"
        )


def sequence_fits_microbatch(config: Config) -> Problems:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.learner.max_tokens_per_microbatch < longest:
        yield (
            f"learner.max_tokens_per_microbatch must hold the longest sequence, data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens={config.rollout.max_new_tokens} = {longest}; "
            f"got {config.learner.max_tokens_per_microbatch}. Raise it to at least {longest}"
        )


def loss_is_consistent(config: Config) -> Problems:
    try:
        check_loss(config.loss, config.learner.updates_per_batch)
        if "ref_logprobs" in required_inputs(config.loss):
            yield (
                f"loss.kl_coef={config.loss.kl_coef} needs a reference policy, which the learner does not have yet. "
                "Use loss.kl_coef=0; loss.behavior_kl regularises towards the policy that sampled"
            )
    except ConfigError as error:
        yield str(error)


RULES = (
    groups_have_siblings,
    batch_divides,
    sequence_fits_microbatch,
    loss_is_consistent,
)
