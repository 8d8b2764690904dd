"""The critic: a Hugging Face token classifier with one label, which is the value of each state, and its loss."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from asyncrl.checks.architecture import longest_sequence
from asyncrl.checks.loaded_weights import refuse_unequal
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model.building import built
from asyncrl.learner.model.layout import blank, with_our_attention
from asyncrl.learner.model.loading import Recipe, as_config_error, of_transformers
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.parallel.tensor import whole
from asyncrl.schema import Config

HEADS = ("score", "classifier")
"""Names of the linear layer of transformers' token classifiers."""
NEXT_TOKEN_HEADS = ("lm_head", "embed_out", "output_projection")
"""Names of the linear layer of its causal LMs."""


class CriticModel(PackedModel):
    """Maps packed tokens to the value of the state in which each chosen token was sampled."""

    entries = ("seen", "seen_alone")

    def __init__(self, hf: PreTrainedModel) -> None:
        """Raises ConfigError, see `value_head`."""
        super().__init__(hf)
        value_head(hf)

    def forward(self, pack: Pack) -> Float[Tensor, " tokens"]:
        """Values, fp32 [T], 0 outside `loss_positions`. Computed at the token before the sampled one."""
        hidden, mine = self.states_at(pack)
        head = value_head(self.hf)
        bias = None if head.bias is None else whole(head.bias).float()
        found = functional.linear(hidden.float(), whole(head.weight).float(), bias)[:, 0]
        values = self.told(found, mine, len(pack.predictors))
        return torch.zeros(len(pack.input_ids), device=values.device).index_copy(0, pack.loss_positions, values)

    def seen(self, pack: Pack) -> Float[Tensor, "tokens width"]:
        """Hidden states normalised to unit RMS, because a new head's values are all 0."""
        everywhere = torch.arange(len(pack.input_ids), device=pack.input_ids.device)
        hidden, mine = self.states_at(replace(pack, predictors=everywhere))
        return _of_unit_size(self.told(hidden, mine, len(everywhere)))

    def seen_alone(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """The same for one sequence, computed by transformers alone."""
        return _of_unit_size(self.body(input_ids=ids[None], use_cache=False).last_hidden_state[0])


def _of_unit_size(hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
    return functional.rms_norm(hidden.float(), hidden.shape[-1:])


def value_head(hf: PreTrainedModel) -> nn.Linear:
    """The value head. Raises ConfigError for an architecture whose token classifier does not end in one."""
    found = _heads(hf)
    if not found:
        raise ConfigError(
            f"critic.path: {type(hf).__name__} does not end in a linear layer named {' or '.join(HEADS)}; use a model "
            "whose token classifier does (Llama, Qwen2, Qwen3, Mistral)"
        )
    return found[0][1]


def _heads(hf: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in hf.named_children() if name in HEADS and isinstance(module, nn.Linear)]


def build_critic(config: Config, device: torch.device, backend: Backend | None) -> CriticModel:
    """Load `critic.path` (default `model.path`) like the policy. A checkpoint without a value head gets one of zeros.

    Raises:
        ConfigError: it cannot be loaded as a token classifier with one label.
    """
    path = config.critic.path or config.model.path
    recipe = Recipe(
        setting=f"critic.path={path}",
        path=path,
        load=lambda: load_classifier(path),
        build=lambda: blank_classifier(path),
        make=CriticModel,
        kept="float32",
        needless=of_next_token,
        may_lack=lambda hf: [f"{name}.{each}" for name, head in _heads(hf) for each, _ in head.named_parameters()],
    )
    way_out = "Give a causal LM, or a token classifier with num_labels=1"
    with as_config_error(recipe.setting, "a token classifier with one label", way_out):
        return built(recipe, config.model, longest_sequence(config), device, backend)


OPTIONS: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}


def load_classifier(path: str) -> PreTrainedModel:
    options = OPTIONS | {"num_labels": 1, "output_loading_info": True}
    with of_transformers():
        hf, loaded = with_our_attention(partial(AutoModelForTokenClassification.from_pretrained, path, **options))
    missing, unexpected = set(loaded["missing_keys"]), set(loaded["unexpected_keys"])
    of_head = {key for key in missing if key.partition(".")[0] in HEADS}
    refuse_unequal(type(hf).__name__, missing - of_head, unexpected - of_next_token(unexpected))
    for name in of_head:
        nn.init.zeros_(hf.get_parameter(name))  # random values would distort the first advantages
    return hf


def of_next_token(names: Collection[str]) -> set[str]:
    """Which of these weights are those of the head for the next token, which a critic does not need."""
    return {name for name in names if name.partition(".")[0] in NEXT_TOKEN_HEADS}


def blank_classifier(path: str) -> PreTrainedModel:
    with of_transformers():
        settings = AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False)
        return blank(AutoModelForTokenClassification, settings, **OPTIONS)


def value_loss(
    values: Float[Tensor, " T"],
    targets: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    clip: float,
    tokens: float,
) -> Float[Tensor, ""]:
    """Half the squared error per loss token. With `clip`, the larger of that and the error of the value moved at most
    `clip` away from the old one (PPO's value clipping).

    Args:
        targets, old_values: without gradient; for all updates of a batch the old values are those before the first.
        clip: 0 is no clipping.
        tokens: loss tokens of the whole minibatch, over all ranks and micro-batches.
    """
    error = (values - targets).square()
    if clip > 0:
        moved = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (moved - targets).square())
    return 0.5 * torch.where(mask, error, 0.0).sum() / max(tokens, 1.0)
