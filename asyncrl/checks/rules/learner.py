"""Rules for batches, advantages and losses: parts that do not fit together or would do nothing."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from asyncrl.checks.parallel import proven_with, ranks_divide
from asyncrl.checks.problem import Problems, divisors
from asyncrl.checks.rules.checkpoints import best_is_measured, copies_last, exports_have_checkpoints
from asyncrl.checks.rules.settings import ENVIRONMENTS
from asyncrl.errors import ConfigError
from asyncrl.schema import AdvantageConfig, Config, RunSettings
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import (
    ESTIMATORS,
    check_loss,
    find_preset,
    required_inputs,
    resolve,
)


def groups_have_siblings(config: Config) -> Problems:
    if config.advantage.needs_siblings and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size must be at least 2 when advantages are relative to the group (advantage.baseline="
            f"{config.advantage.baseline}, advantage.std={config.advantage.std}): a single trajectory's advantage is "
            f"always 0; got {config.rollout.group_size}. Raise it, or set advantage.baseline=none"
        )


ESTIMATOR_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "group": (("mean", "loo", "opo", "greedy", "none"), ("none", "group", "batch"), ()),
    "gdpo": (("mean",), ("group",), ("components",)),
    "turns": (("mean", "none"), ("none", "group", "batch"), ("gamma",)),
    "turns_by_number": (("mean", "none"), ("none", "group", "batch"), ("gamma",)),
    "reinforce_pp": (("none", "mean"), ("batch",), ("gamma",)),
    "gae": (("none",), ("none", "batch"), ("gamma", "lam", "lam_alpha")),
    "vtrace": (("none",), ("none", "batch"), ("gamma", "lam", "c_bar")),
    "vtrace_turns": (("none",), ("none", "batch"), ("gamma", "lam", "c_bar")),
    "retrace": (("none",), ("none", "batch"), ("gamma", "lam", "lam_alpha", "c_bar")),
    "retrace_turns": (("none",), ("none", "batch"), ("gamma", "lam", "lam_alpha", "c_bar")),
    "custom": (("none",), ("none",), ("function", "args", "components")),
}
"""For each estimator: the baselines and stds it accepts, and the other settings it reads."""
DEFAULTS: dict[str, object] = {"gamma": 1.0, "lam": 0.95, "lam_alpha": 0.0, "c_bar": 1.0, "components": {}}
DEFAULTS |= {"function": "", "args": {}}
"""Defaults of the settings that not every estimator reads."""
CHOICES = {"group": "grpo", "vtrace_turns": "vtrace", "retrace_turns": "retrace"}
"""Names in configs/advantage/ of estimators for which they differ."""


def batch_divides(config: Config) -> Problems:
    groups, updates = config.learner.groups_per_step, config.learner.updates_per_batch
    if updates < 1 or config.learner.ranks < 1:
        return  # refused by numbers_in_range
    if groups % updates:
        fits = map(str, divisors(groups)[:12])
        yield (
            "learner.groups_per_step must be a multiple of learner.updates_per_batch, so that each update gets an "
            f"equal number of whole groups; got {groups} and {updates}. {groups} is divisible by {', '.join(fits)}"
        )
    key = "rollout.min_group_size" if config.rollout.min_group_size else "rollout.group_size"
    sequences = groups * (config.rollout.min_group_size or config.rollout.group_size) // updates
    shares = {"sequence_parallel": config.learner.sequence_parallel, "tensor_parallel": config.learner.tensor_parallel}
    if sequences * math.prod(max(1, size) for size in shares.values()) < config.learner.ranks:
        shared = "".join(f" / learner.{key}={size}" for key, size in shares.items() if size > 1)
        yield (
            f"every rank needs a sequence in every update: learner.groups_per_step * {key} / "
            f"learner.updates_per_batch = {sequences} is less than learner.ranks={config.learner.ranks}{shared}. Raise "
            "learner.groups_per_step, or use fewer ranks"
        )


def ranks_are_laid_out(config: Config) -> Problems:
    yield from ranks_divide(config.learner, config.learner.ranks)
    unproven = {
        f"learner.hook={config.learner.hook}": bool(config.learner.hook),
    }
    yield from proven_with("learner.sequence_parallel", config.learner.sequence_parallel, unproven)
    yield from proven_with("learner.expert_parallel", config.learner.expert_parallel, unproven)
    yield from proven_with("learner.tensor_parallel", config.learner.tensor_parallel, unproven)


def why_never_warm(config: Config) -> str:
    """Return why the learning rate never reaches `learner.lr`; empty if it does."""
    learner, steps = config.learner, config.learner.steps - config.critic.warmup_steps
    if learner.warmup_steps <= steps:
        return ""
    return (
        f"learner.warmup_steps={learner.warmup_steps} is more than the {steps} steps that are trained: the rate ends "
        f"at {learner.lr * steps / learner.warmup_steps:g} instead of learner.lr={learner.lr:g}"
    )


def sequence_fits_microbatch(config: Config) -> Problems:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.learner.max_tokens_per_microbatch < longest:
        yield (
            f"learner.max_tokens_per_microbatch must hold the longest sequence, data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens={config.rollout.max_new_tokens} = {longest}; "
            f"got {config.learner.max_tokens_per_microbatch}. Raise it to at least {longest}"
        )


def resolved_loss(loss: LossConfig) -> dict[str, Any]:
    """Return every part of the loss with the preset's values filled in; None for a part that is not used. As settings,
    they give the same loss."""
    return {name: value for name, value in asdict(resolve(loss)).items() if value != {}}


def loss_is_consistent(config: Config) -> Problems:
    try:
        check_loss(config.loss, config.learner.optimizer_steps, config.learner.proximal_ema > 0)
        yield from _loss_has_its_estimator(config)
        yield from _reference_has_a_use(config)
    except ConfigError as error:
        yield str(error)


def _loss_has_its_estimator(config: Config) -> Problems:
    loss, advantage = config.loss.preset, config.advantage
    wanted = ESTIMATORS.get(loss)
    if wanted and (advantage.estimator.removesuffix("_turns"), advantage.baseline) != wanted:
        yield (
            f"loss={loss} needs advantage.estimator={wanted[0]} with advantage.baseline={wanted[1]}; got "
            f"{advantage.estimator} and {advantage.baseline}. Add advantage={loss}"
        )
    row, settings = find_preset(loss), resolve(config.loss)
    if advantage.estimator.startswith("vtrace") and (row.surrogate != "reinforce" or settings.weight != "none"):
        yield (
            f"advantage.estimator={advantage.estimator} already has the ratio learner/behavior in the advantage, and "
            f"loss={loss} would apply it a second time. Use loss=vtrace, or advantage=gae or retrace"
        )


def _reference_has_a_use(config: Config) -> Problems:
    priced = config.advantage.kl_coef > 0 or "ref_logprobs" in required_inputs(config.loss)
    if config.reference.path and not priced:
        yield (
            f"reference.path={config.reference.path} does nothing, because no KL to it is measured. Set loss.kl_coef "
            "(in the loss) or advantage.kl_coef (in the reward), or leave it out"
        )
    if config.reference.from_rollout and config.environment.name in ENVIRONMENTS:
        yield (
            "reference.path=rollout reads the reference's log-probs from the trajectories, but "
            f"environment.name={config.environment.name} attaches none. Use an environment of your own that does "
            "(file.py:Name, see docs/environments.md), or reference.path=MODEL (a folder named rollout: ./rollout)"
        )
    if config.advantage.kl_target > 0 and config.advantage.kl_coef == 0:
        yield (
            f"advantage.kl_target={config.advantage.kl_target} adjusts advantage.kl_coef by multiplying it, and it is "
            "0. Set an initial advantage.kl_coef, for example 0.01"
        )


def advantage_is_consistent(config: Config) -> Problems:
    """Refuse settings that the estimator does not read, or reads differently."""
    given = config.advantage
    if given.estimator not in ESTIMATOR_SETTINGS:
        return  # refused by known_words
    baselines, stds, reads = ESTIMATOR_SETTINGS[given.estimator]
    for key, value, choices in (("baseline", given.baseline, baselines), ("std", given.std, stds)):
        if value not in choices:
            yield (
                f"advantage.estimator={given.estimator} takes advantage.{key}={' or '.join(choices)}; got {value}. "
                f"advantage={CHOICES.get(given.estimator, given.estimator)} sets all of them together"
            )
    if given.baseline == "greedy" and given.std != "none" and given.kl_coef > 0:
        yield (
            f"advantage.std={given.std} scales whole trajectories, but with advantage.baseline=greedy and "
            f"advantage.kl_coef={given.kl_coef} each token has a return of its own. Set advantage.std=none, or "
            "loss.kl_coef in place of advantage.kl_coef"
        )
    centred = given.estimator == "reinforce_pp" and given.baseline != "none"
    for key, default in DEFAULTS.items():
        value = getattr(given, key)
        if value != default and (key not in reads or centred):
            yield (
                f"advantage.{key}={value} does nothing with advantage.estimator={given.estimator}"
                f"{f' and baseline={given.baseline}' if centred else ''}. "
                f"{f'Write advantage=custom advantage.function={value}' if key == 'function' else 'Leave it out'}"
            )
    if given.estimator == "custom" and ":" not in given.function:
        yield (
            "advantage=custom needs advantage.function=file.py:name or package.module:name; got "
            f"{given.function or 'none'}"
        )
    if given.estimator == "gdpo":
        yield from _components_count(given)
    if given.credits_turns and given.kl_coef > 0:
        yield (
            f"advantage.kl_coef={given.kl_coef} adds the KL to the reward, but advantage.estimator={given.estimator} "
            "only uses the rewards of the turns. Set loss.kl_coef instead"
        )
    sequences = config.learner.groups_per_step * config.rollout.group_size
    if given.kl_target > 0 and 0.2 * sequences >= given.kl_horizon > 0:
        yield (
            f"advantage.kl_horizon={given.kl_horizon:g} is too short: one step of {sequences} sequences "
            "(learner.groups_per_step * rollout.group_size) below the target would set the coefficient to 0 for good, "
            f"because it is adjusted by multiplication. Set more than {0.2 * sequences:g}, or leave it out"
        )


def _components_count(given: AdvantageConfig) -> Problems:
    weights = given.components
    if not any(weights.values()) or not all(math.isfinite(weight) for weight in weights.values()):
        yield (
            "advantage.estimator=gdpo needs the weights of the reward's named parts, finite and not all 0; got "
            f"advantage.components={weights}. Set for example advantage.components.correct=1, where `correct` is a key "
            "of the dictionary that the reward function returns"
        )
    if given.kl_coef > 0:
        yield (
            f"advantage.kl_coef={given.kl_coef} adds the KL to the reward, but advantage.estimator=gdpo only uses the "
            "reward's parts. Set loss.kl_coef instead"
        )


CRITIC_LR = 1e-5
"""The default of `critic.lr`, which every config contains, with a critic or without."""


def critic_has_a_use(config: Config) -> Problems:
    critic = config.critic
    given: dict[str, object] = {"path": critic.path, "lr": critic.lr if critic.lr != CRITIC_LR else 0}
    given |= {"warmup_steps": critic.warmup_steps, "value_clip": critic.value_clip}
    if not config.advantage.uses_critic:
        for key, value in given.items():
            if value:
                yield (
                    f"critic.{key}={value} does nothing with advantage.estimator={config.advantage.estimator}, which "
                    "has no critic. Leave it out, or use advantage=gae, vtrace or retrace"
                )
        return
    if critic.warmup_steps >= config.learner.steps:
        yield (
            f"critic.warmup_steps={critic.warmup_steps} leaves none of learner.steps={config.learner.steps} to train "
            "the policy. Lower it"
        )
    if critic.value_clip > 0 and config.learner.optimizer_steps == 1:
        yield (
            f"critic.value_clip={critic.value_clip} limits how far the later updates of a batch move a value, and with "
            "learner.updates_per_batch=1 there are none. Set critic.value_clip=0, or learner.updates_per_batch=2 or "
            "more"
        )


def adapters_have_a_use(config: Config) -> Problems:
    model = config.model
    if model.lora_rank > 0 and config.learner.proximal_ema > 0:
        yield (
            f"learner.proximal_ema={config.learner.proximal_ema} averages whole models, but with "
            f"model.lora_rank={model.lora_rank} only adapters are trained. Set learner.proximal_ema=0, which anchors "
            "the loss at the weights before the update"
        )


def moments_have_a_place(config: RunSettings) -> Problems:
    if config.learner.offload == "optimizer" and config.learner.optimizer == "adamw_8bit":
        yield (
            "learner.offload=optimizer only moves float32 moments, and learner.optimizer=adamw_8bit keeps others. Use "
            "one of the two; learner.offload=all works with both"
        )


def compiles_with_the_rest(config: Config) -> Problems:
    if config.learner.router_replay and config.model.compile:
        yield (
            "model.compile=true does not go with learner.router_replay=true, which reaches into every layer while it "
            "computes. Set one of them to false"
        )


def layers_can_be_compiled(config: RunSettings) -> Problems:
    model, tensor_parallel = config.model, config.learner.tensor_parallel
    if model.compile and tensor_parallel > 1:
        yield (
            f"model.compile=true cannot compile sums over ranks, and learner.tensor_parallel={tensor_parallel} has "
            "them in every layer. Set model.compile=false, or learner.tensor_parallel=1"
        )
    if model.compile and model.checkpoint_keep == "matmul":
        yield (
            "model.checkpoint_keep=matmul keeps products that are out of reach in code compiled by "
            "model.compile=true. Set model.checkpoint_keep=attention, or model.compile=false"
        )


def hook_has_a_path(config: Config) -> Problems:
    learner = config.learner
    if learner.hook and ":" not in learner.hook:
        yield f"learner.hook must be file.py:name or package.module:name; got {learner.hook}"


def profile_names_steps(config: Config) -> Problems:
    given = config.learner.profile
    first, _, last = given.partition(":")
    if given and not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        yield (
            "learner.profile must be FIRST:LAST, the first and last train step to profile, counted from 1; got "
            f"{given}. Example: 10:13. Or leave it out"
        )
    elif given and int(first) > config.learner.steps and not config.learner.epochs:  # epochs set it later
        yield (
            f"learner.profile={given} does nothing: learner.steps={config.learner.steps} is before the first of these. "
            "Name steps that are trained, or leave it out"
        )


RULES = (
    exports_have_checkpoints,
    copies_last,
    groups_have_siblings,
    batch_divides,
    ranks_are_laid_out,
    sequence_fits_microbatch,
    loss_is_consistent,
    advantage_is_consistent,
    critic_has_a_use,
    adapters_have_a_use,
    best_is_measured,
    moments_have_a_place,
    layers_can_be_compiled,
    compiles_with_the_rest,
    hook_has_a_path,
    profile_names_steps,
)
