"""`policy_loss`: aggregate(rejection * weight * surrogate) + KL terms, with diagnostics over the raw ratios.

One call is one micro-batch. With global `denominators` the losses and gradients of all micro-batches and ranks add up
to those of the whole batch, however it was split. Losses that depend on all tokens of a batch get the result of a first
pass over it (`kept`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.losses.aggregate import kept_factors, token_factors
from asyncrl.losses.centering import centered, weight_log_ratio
from asyncrl.losses.custom import custom_loss
from asyncrl.losses.diagnostics import Sums, diagnose, summarize
from asyncrl.losses.inputs import Denominators, Kept, LossInputs
from asyncrl.losses.kept import first_pass
from asyncrl.losses.kl import kl_estimate, without_rounding
from asyncrl.losses.ratios import LOG_RATIO_LIMIT, Tokens, edge_ends, make_safe, surrogate_edge, with_anchor
from asyncrl.losses.rejection import kept_tokens, rejections
from asyncrl.losses.surrogates import SURROGATES
from asyncrl.losses.weights import behavior_weight
from asyncrl.settings.loss.keys import KEYS, LossConfig
from asyncrl.settings.loss.meaning import find_preset, looks_at_all, resolve
from asyncrl.settings.loss.presets import Preset


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of one call, with its parts and diagnostics."""

    loss: Float[Tensor, ""]
    sums: Sums = field(default_factory=Sums)
    parts: dict[str, Tensor] = field(default_factory=dict)
    """`loss/policy`, `loss/kl`, `loss/behavior_kl`, `loss/entropy`; they can be summed over calls like the loss."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics of this call alone, detached scalars. To combine calls, sum the fields above, then `summarize()`."""
        return summarize(self.sums) | self.parts


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    denominators: Denominators | None = None,
    diagnostics: bool = True,
    kept: Kept | None = None,
) -> LossOutput:
    """Loss of the packed tokens of one micro-batch, differentiable with respect to `learner_logprobs` (with
    `entropy_coef` also to `entropy`, with `centering` to those of `topk`).

    Args:
        inputs: [T] tensors; float32 or float64 determines the precision (bfloat16 is converted to float32).
        config: from `preset()` or directly from Hydra.
        denominators: counts over the whole optimizer batch; None counts this call's own tokens.
        diagnostics: False leaves only the loss parts in `metrics`.
        kept: for a loss that `needs_first_pass`, the result of that pass over the optimizer batch
            (`asyncrl.losses.kept`); None makes one over this call.

    Raises:
        ConfigError: a refused setting, or a missing input that the loss needs.
    """
    row, config = _resolved(config)
    tokens = with_anchor(make_safe(inputs), row)
    if looks_at_all(row, config):
        if kept is None and denominators is not None and config.denominator == "renormalize":
            raise ConfigError(
                "loss.denominator=renormalize divides by what is kept of the whole optimizer batch; pass "
                "kept=first_pass(...) beside the denominators, or leave both out"
            )
        tokens = dataclasses.replace(tokens, whole=kept or first_pass([inputs], config))
    edge = surrogate_edge(tokens, row, config)
    shaped = (
        custom_loss(tokens, config) if row.surrogate == "custom" else SURROGATES[row.surrogate](tokens, config, edge)
    )
    loss, held = shaped.loss, {}
    if config.weight != "none":
        weight, below, above = behavior_weight(tokens, config, weight_log_ratio(tokens, row))
        loss = loss * weight
        shaped = dataclasses.replace(shaped, loss=loss)
        held |= {"weight_low": below, "weight_high": above}
    if config.centering:
        shaped = centered(shaped, tokens, config, row, edge)
        loss = shaped.loss
    reasons = rejections(tokens, config)
    keep = kept_tokens(tokens, config, reasons, held)
    of_all = factors = token_factors(tokens, config, denominators)
    if config.denominator == "renormalize":
        factors = kept_factors(tokens, keep, config)
    parts = {"loss/policy": add_up(loss if keep is tokens.mask else torch.where(keep, loss, 0.0), factors)}
    # Rejected tokens stay in the KL terms, so they also stay in the denominator of these.
    parts |= kl_parts(tokens, row, config, edge, of_all)
    total = torch.stack(list(parts.values())).sum() if len(parts) > 1 else parts["loss/policy"]
    parts = {name: part.detach() for name, part in parts.items()}
    if not diagnostics:
        return LossOutput(total, parts=parts)
    held |= {f"rejected_{name}": rejected for name, rejected in reasons.items()}
    return LossOutput(total, diagnose(tokens, shaped, held), parts)


def add_up(values: Float[Tensor, " T"], factors: Tensor) -> Float[Tensor, ""]:
    """Sum of values * factors. A single factor is applied to the sum, which saves two passes over the tokens."""
    return values.sum() * factors if factors.ndim == 0 else (values * factors).sum()


def kl_parts(tokens: Tokens, row: Preset, config: LossConfig, edge: str, factors: Tensor) -> dict[str, Tensor]:
    """The active regularisers, over all loss tokens, including rejected ones."""
    parts: dict[str, Tensor] = {}
    if config.kl_coef:
        parts["loss/kl"] = config.kl_coef * add_up(reference_kl(tokens, row, config, edge), factors)
    if config.behavior_kl:
        apart = without_rounding(tokens.cur, tokens.mu) - tokens.mu
        parts["loss/behavior_kl"] = config.behavior_kl * add_up(apart.square(), factors)
    if config.entropy_coef:
        parts["loss/entropy"] = -config.entropy_coef * add_up(entropy_of(tokens, config), factors)
    return parts


def entropy_of(tokens: Tokens, config: LossConfig) -> Float[Tensor, " T"]:
    """Entropy of the loss tokens; 0 elsewhere, whatever the input contains."""
    if tokens.raw.entropy is None:
        raise ConfigError(
            f"loss.entropy_coef={config.entropy_coef} needs entropy in LossInputs and got None; pass that of the "
            "policy at each token, with its gradient, or set loss.entropy_coef=0"
        )
    return torch.where(tokens.mask, tokens.raw.entropy.to(tokens.cur.dtype), 0.0)


def reference_kl(tokens: Tokens, row: Preset, config: LossConfig, edge: str) -> Float[Tensor, " T"]:
    """KL estimate per token; `ratio_` kinds are multiplied by the differentiable token ratio (DeepSeek-V3.2)."""
    if tokens.ref is None:
        raise ConfigError(
            f"loss.kl_coef={config.kl_coef} needs ref_logprobs in LossInputs and got None; pass the reference policy's "
            "log-probs, or set loss.kl_coef=0"
        )
    kind = config.kl or "k3"
    of_policy = kind.removeprefix("ratio_")
    # The gradient of k1 does not depend on the reference.
    cur = tokens.cur if of_policy == "k1" else without_rounding(tokens.cur, tokens.ref)
    estimate = kl_estimate(cur, tokens.ref, of_policy)
    if kind == of_policy:
        return estimate
    new, old = edge_ends(tokens, "E" if edge in ("", "B") else edge)
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * estimate


_RESOLVED: dict[tuple, tuple[Preset, LossConfig]] = {}


def _resolved(config: LossConfig) -> tuple[Preset, LossConfig]:
    """`resolve()`, cached by value: it takes longer than the loss of a small micro-batch."""
    values = (getattr(config, name) for name in KEYS)
    key = (config.preset, *(repr(value) if isinstance(value, dict) else value for value in values))
    if key not in _RESOLVED:
        resolved = resolve(config)
        _RESOLVED[key] = find_preset(config.preset), resolved
    return _RESOLVED[key]
