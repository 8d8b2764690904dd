"""The models of a learner: the policy, and the critic, reference and averaged policy if the settings need them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from asyncrl.data.vocabulary import ids_of, models_beside, refuse_lacking
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.hook import Hook, Update
from asyncrl.learner.model.critic import CriticModel, build_critic
from asyncrl.learner.model.packed import Layout, PackedModel
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.model.routing import RouterReplay
from asyncrl.learner.optimizer.spikes import Spikes
from asyncrl.learner.optimizer.update import UpdateReport, make_optimizer
from asyncrl.losses.kl import AdaptiveKL
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import required_inputs, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    model: CriticModel
    optimizer: torch.optim.Optimizer


@dataclass(slots=True, kw_only=True)
class Roles:
    """The models of the learner. Every model is sharded over the same ranks in the same way."""

    policy: PolicyModel
    optimizer: torch.optim.Optimizer
    critic: Critic | None = None
    reference: PolicyModel | None = None
    """The frozen reference policy of the KL."""
    reference_comes: bool = False
    """Whether the reference log-probs come with the trajectories, so that no model is loaded."""
    base_is_reference: bool = False
    """With LoRA: the reference is the policy with its adapters switched off, not a model of its own."""
    average: PolicyModel | None = None
    """Moving average of the policy's weights, used as the proximal policy (`learner.proximal_ema`)."""
    kl_coef: float = 0.0
    """Current KL coefficient of the reward: starts at `advantage.kl_coef`, adapted by `kl_control`."""
    kl_control: AdaptiveKL | None = None
    spikes: dict[str, Spikes] = field(default_factory=dict)
    """By the names of `trained`; empty if no spikes are skipped."""
    hook: Hook | None = None
    """User-defined hook around each optimizer step of the policy (`learner.hook`)."""

    def smaller_vocabularies(self, config: Config) -> dict[str, tuple[str, int]]:
        """Path and vocabulary of the models with fewer tokens than the policy, by their settings."""
        paths, found = models_beside(config), dict[str, tuple[str, int]]()
        models = {"critic.path": self.critic and self.critic.model, "reference.path": self.reference}
        for key, model in models.items():
            if model is not None and model.rows < self.policy.rows:
                found[key] = paths.get(key, config.model.path), model.rows
        return found

    def norm_limit(self, name: str) -> float:
        """Gradient norm above which an update of the model is skipped."""
        return self.spikes[name].limit if name in self.spikes else math.inf

    def note_norm(self, report: UpdateReport, name: str, step: int) -> None:
        if name in self.spikes:
            self.spikes[name].note(report, name, step)

    def call_hook(self, moment: str, step: int, index: int, report: UpdateReport | None = None) -> dict[str, float]:
        """Call the hook. Returns its metrics; an empty dict without a hook."""
        if self.hook is None:
            return {}
        update = Update(
            moment=moment,
            step=step,
            index=index,
            rank=self.hook.rank,
            world=self.hook.world,
            model=self.policy.hf,
            optimizer=self.optimizer,
            report=report,
        )
        return self.hook.call(update)

    @property
    def in_rows(self) -> bool:
        """Whether one of the models cannot be packed, so that micro-batches are planned as rows."""
        return any(model.layout is Layout.ROWS for model in self.models())

    def models(self) -> list[PackedModel]:
        others = (self.reference, self.average)
        return [*(model for _, model, _ in self.trained()), *(model for model in others if model is not None)]

    def trained(self) -> Iterator[tuple[str, PackedModel, torch.optim.Optimizer]]:
        """`(name, model, optimizer)` of each model that is trained."""
        yield "policy", self.policy, self.optimizer
        if self.critic is not None:
            yield "critic", self.critic.model, self.critic.optimizer


def needs_reference(config: Config) -> bool:
    return config.advantage.kl_coef > 0 or "ref_logprobs" in required_inputs(config.loss)


def build_roles(config: Config, device: torch.device, backend: Backend | None) -> Roles:
    """Load every model that the settings need.

    Raises:
        ConfigError: one of them cannot be loaded; the message names its setting.
    """
    policy = build_model(config, device, backend)
    roles = Roles(policy=policy, optimizer=make_optimizer(policy.parameters(), config.learner))
    advantage, ema = config.advantage, config.learner.proximal_ema
    if advantage.uses_critic:
        critic = build_critic(config, device, backend)
        roles.critic = Critic(model=critic, optimizer=make_optimizer(critic.parameters(), config.learner))
    roles.base_is_reference = needs_reference(config) and policy.adapters is not None and not config.reference.path
    roles.reference_comes = needs_reference(config) and config.reference.from_rollout
    if needs_reference(config) and not roles.base_is_reference and not roles.reference_comes:
        roles.reference = build_model(config, device, backend, path=config.reference.path, frozen=True)
    if smaller := roles.smaller_vocabularies(config):
        refuse_lacking(smaller, policy.rows, ids_of(config.model.path))
    if ema > 0:
        roles.average = build_model(config, device, backend, averaged=True)
    if config.learner.router_replay:
        for model in filter(None, (policy, roles.average)):
            model.replay = RouterReplay(model, f"model.path={config.model.path}")
    policy.through_entropy = bool(resolve(config.loss).entropy_coef)
    if config.learner.skip_spikes > 0:
        roles.spikes = {name: Spikes(config.learner.skip_spikes) for name, _, _ in roles.trained()}
    roles.kl_coef = advantage.kl_coef
    if advantage.kl_target > 0:
        roles.kl_control = AdaptiveKL(advantage.kl_target, advantage.kl_horizon)
    return roles
