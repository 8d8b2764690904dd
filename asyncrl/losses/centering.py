"""Score centering (Marek and Ryabinin, 2609.20807): subtracts the score's mean under the sampler from the gradient.

Under the sampler q the score s_v = grad log p_v has a nonzero mean whenever q is not p, whatever the advantage; it
pushes the policy with every token. Let w_v be the weight that the loss gives token v (so that its gradient is
-A w_v s_v). The centered gradient of a sampled token a is

    -A (w_a s_a - sum_v q_v w_v s_v)

The sum runs over the vocabulary; the engine recorded the k most likely tokens H of q. As in the paper, the rest is
assumed to be distributed as under p, q_v = alpha p_v with alpha = (1 - Q_H) / (1 - P_H). Since sum_v p_v s_v = 0 over
the whole vocabulary, the rest becomes a sum over H again:

    sum_v q_v w_v s_v  =  sum_{v in H} (q_v w_v - alpha w_rest p_v) s_v

Choices where the paper leaves it open: w is not derived for each loss by hand, but is the derivative of its surrogate
(and behavior weight) at an artificial token with probabilities p_v and q_v, so every loss of single tokens can be
combined with it. The rest counts as one token with probabilities 1 - P_H and 1 - Q_H: its ratio is 1 / alpha, as in the
paper, and bounds on a difference of probabilities see the largest possible one. The coefficients are detached. The term
adds nothing to the value of the loss, so that it stays comparable. The importance weight that `vtrace` has in its
advantage counts as part of the advantage. Regularisers (`behavior_kl`, `kl_coef`) are not centered.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.losses.inputs import LossInputs, TopK
from asyncrl.losses.ratios import Tokens, edge_ends
from asyncrl.losses.surrogates import SURROGATES, Shaped
from asyncrl.losses.weights import behavior_weight
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.presets import Preset

FLOOR_ROUNDINGS = 16
"""The probability left outside H is at least this many roundings of 1: less is noise, and alpha is a quotient."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Log-probs of the tokens of each row of `TopK`, followed by the rest as one token."""

    learner: Float[Tensor, "C k1"]
    behavior: Float[Tensor, "C k1"]
    there: Float[Tensor, "C k1"]
    """1, or 0 for tokens that the engine did not record."""

    @classmethod
    def of(cls, topk: TopK, dtype: torch.dtype) -> Spread:
        p, q = topk.learner_logprobs.detach().to(dtype), topk.behavior_logprobs.detach().to(dtype)
        there = q > -torch.inf  # false for NaN
        p, q = (torch.where(there, each, 0.0) for each in (p, q))
        floor = FLOOR_ROUNDINGS * torch.finfo(dtype).eps

        def with_rest(logprobs: Tensor) -> Tensor:
            rest = 1 - torch.where(there, logprobs.exp(), 0.0).sum(1, keepdim=True)
            return torch.cat([logprobs, rest.clamp(min=floor).log()], 1)

        ones = torch.ones(len(there), 1, dtype=dtype, device=there.device)
        return cls(with_rest(p), with_rest(q), torch.cat([there.to(dtype), ones], 1))


def centered(shaped: Shaped, tokens: Tokens, config: LossConfig, row: Preset, edge: str) -> Shaped:
    """Center the gradient of `shaped`, whose loss includes the behavior weight. With a proximal policy, this is
    possible only if it is the current one (`check_loss`).

    Raises:
        ConfigError: `LossInputs.topk` is missing.
    """
    topk = tokens.raw.topk
    if topk is None:
        raise ConfigError(
            "loss.centering=true needs topk in LossInputs and got None; pass it (in a run: engine.record_topk=64), or "
            "set loss.centering=false"
        )
    dtype = tokens.cur.dtype
    spread = Spread.of(topk, dtype)
    slopes = slopes_of(spread, tokens.advantages[topk.places], tokens, config, row, edge)
    alpha = (spread.behavior[:, -1:] - spread.learner[:, -1:]).exp()
    head = spread.behavior[:, :-1].exp() * slopes[:, :-1] - alpha * slopes[:, -1:] * spread.learner[:, :-1].exp()
    head = head * spread.there[:, :-1]
    # Before anything else: tokens that were not recorded may have -inf under a truncated policy, and 0 * -inf is NaN.
    cur = torch.where(spread.there[:, :-1] > 0, topk.learner_logprobs.to(dtype), 0.0)
    term = -(head * (cur - cur.detach())).sum(1)
    covered = (spread.behavior[:, :-1].exp() * spread.there[:, :-1]).sum(1)

    def at_tokens(values: Tensor) -> Tensor:
        return torch.zeros_like(tokens.cur).index_add(0, topk.places, values)

    numbers = {"centering/removed": at_tokens(head.abs().sum(1)), "centering/covered": at_tokens(covered)}
    return dataclasses.replace(shaped, loss=shaped.loss + at_tokens(term), numbers={**shaped.numbers, **numbers})


def slopes_of(
    spread: Spread, advantages: Float[Tensor, " C"], tokens: Tokens, config: LossConfig, row: Preset, edge: str
) -> Float[Tensor, "C k1"]:
    """d loss / d log p of each artificial token if it had been sampled: -A w."""
    count, width = spread.learner.shape
    with torch.enable_grad():
        cur = spread.learner.flatten().clone().requires_grad_()
        made_up = Tokens(
            raw=LossInputs(
                learner_logprobs=cur,
                behavior_logprobs=spread.behavior.flatten(),
                advantages=advantages.repeat_interleave(width),
                loss_mask=torch.ones_like(cur, dtype=torch.bool),
                sequence_ids=torch.arange(count * width, device=cur.device),
            ),
            mask=torch.ones_like(cur, dtype=torch.bool),
            cur=cur,
            mu=spread.behavior.flatten(),
            prox=None if tokens.prox is None else cur.detach(),
            ref=None,
            advantages=advantages.repeat_interleave(width),
        )
        loss = SURROGATES[row.surrogate](made_up, config, edge).loss
        if config.weight != "none":
            weight, _, _ = behavior_weight(made_up, config, weight_log_ratio(made_up, row))
            loss = loss * weight
        (slopes,) = torch.autograd.grad(loss.sum(), cur)
    return slopes.view(count, width)


def weight_log_ratio(tokens: Tokens, row: Preset) -> Float[Tensor, " T"]:
    """Log-ratio of the behavior weight: B, or E if the surrogate has no ratio of its own that completes it."""
    if row.surrogate == "reinforce":
        return tokens.cur.detach() - tokens.mu
    new, old = edge_ends(tokens, "B")
    return new - old
