"""Advantages with a critic: GAE, V-trace and Retrace over the sampled tokens of [B, T] padded sequences."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asyncrl.advantages.scan import Stream, by_rows, scan
from asyncrl.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Limit on |log-ratio| before `exp`."""


def length_adaptive_lambda(mask: Tensor, alpha: float = 1.5) -> Float[Tensor, " B"]:
    """lambda = 1 - 1/(alpha |y|) for each sequence (VAPO; SAO uses alpha 1.5), for the policy's `gae`; at least 0."""
    if alpha <= 0:
        raise ConfigError(f"alpha of the length-adaptive lambda must be above 0; got {alpha}")
    lengths = mask.bool().sum(1).float()
    return 1.0 - 1.0 / (alpha * lengths).clamp(min=1.0)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"] = 0.95,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation that skips observation tokens; no whitening.

    The last token of an action is followed by the first token of the next action. The value after the last sampled
    token is 0.

    Args:
        rewards, values, mask: [B, T].
        gamma: discount per sampled token.
        lam: one number, or one per sequence (see `length_adaptive_lambda`).

    Returns:
        (advantages, returns = advantages + values), [B, T]; both 0 outside the mask.
    """

    def of_rows(rows: slice, stream: Stream) -> tuple[Tensor, Tensor]:
        r, v = stream.take(rewards[rows]), stream.take(values[rows])
        terms = torch.add(r, stream.following(v), alpha=gamma).sub_(v)
        advantages = scan(terms, stream.factors(gamma * _of(lam, rows), terms))
        return advantages, advantages + v

    advantages, returns = by_rows(mask, values, of_rows, 2)
    return advantages, returns


def _of(lam: float | Tensor, rows: slice) -> float | Tensor:
    return lam[rows] if isinstance(lam, Tensor) else lam


def _exp(log_ratio: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()


@torch.no_grad()
def vtrace(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    trace_log_ratio: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """V-trace (1802.01561) over sampled tokens, skipping observation tokens; the value after the last token is 0.

    min(1, ratio) is one-sided, so noise of rms s in the log-ratio shortens the trace to about 2.5/s tokens. `c_bar`
    above 1 lengthens it again.

    Args:
        rewards, values: [B, T].
        log_ratio: [B, T] log(learner/behavior).
        mask: [B, T].
        gamma, lam: discount and trace decay per sampled token.
        rho_bar, c_bar, pg_rho_bar: caps of the ratio in the temporal difference (determines the fixed point), in the
            trace (how far credit propagates) and in front of the policy gradient.
        trace_log_ratio: [B, T] cuts the trace in place of `log_ratio`; use `segment_log_ratio` of it to cut traces once
            per turn. The two other ratios are always the token's own.

    Returns:
        (advantages, value_targets), [B, T], 0 outside the mask. With every ratio 1 the targets are GAE(lam)'s returns;
        the advantages are min(pg_rho_bar, ratio) (r + gamma (lam v' + (1 - lam) V') - V), rlax's form.
    """

    def of_rows(rows: slice, stream: Stream) -> tuple[Tensor, Tensor]:
        r, v = stream.take(rewards[rows]), stream.take(values[rows])
        ratio = _exp(stream.take(log_ratio[rows]))
        trace = ratio if trace_log_ratio is None else _exp(stream.take(trace_log_ratio[rows]))
        next_value = stream.following(v)
        terms = torch.add(r, next_value, alpha=gamma).sub_(v).mul_(ratio.clamp(max=rho_bar))
        targets = scan(terms, stream.ending(trace.clamp(max=c_bar).mul_(gamma * lam))).add_(v)
        bootstrap = stream.following(targets).mul_(lam).add_(next_value, alpha=1 - lam)
        return torch.add(r, bootstrap, alpha=gamma).sub_(v).mul_(ratio.clamp_(max=pg_rho_bar)), targets

    advantages, targets = by_rows(mask, values, of_rows, 2)
    return advantages, targets


@torch.no_grad()
def retrace(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"] = 0.95,
    c_bar: float = 1.0,
    trace_log_ratio: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Retrace(lambda) (1606.02647) with V in place of Q: GAE whose lambda at the next token is lam min(c_bar, ratio).

    A_t = delta_t + gamma c_{t+1} A_{t+1}, c = lam min(c_bar, learner/behavior). Unlike with `vtrace`, the ratio at t
    itself is not part of A_t; the policy loss applies its own (`ppo`, `dppo_tv`, `cispo`...).

    Args:
        rewards, values, mask: [B, T].
        log_ratio: [B, T] log(learner/behavior).
        gamma, lam: discount and trace decay per sampled token; `lam` may be one per sequence.
        c_bar: cap of the ratio in the trace; above 1 credit propagates further (see `vtrace`).
        trace_log_ratio: [B, T] cuts the trace in place of `log_ratio` (see `vtrace`).

    Returns:
        (advantages, value_targets), [B, T], 0 outside the mask. The targets are V_t + min(c_bar, ratio_t) A_t, with the
            token's own ratio; they equal those of V-trace with rho_bar = c_bar, unless the trace has ratios of its own.
    """

    def of_rows(rows: slice, stream: Stream) -> tuple[Tensor, Tensor]:
        r, v = stream.take(rewards[rows]), stream.take(values[rows])
        rho = _exp(stream.take(log_ratio[rows])).clamp_(max=c_bar)
        c = rho if trace_log_ratio is None else _exp(stream.take(trace_log_ratio[rows])).clamp_(max=c_bar)
        terms = torch.add(r, stream.following(v), alpha=gamma).sub_(v)
        advantages = scan(terms, stream.following(c).mul_(stream.factors(gamma * _of(lam, rows), terms)))
        return advantages, torch.addcmul(v, rho, advantages)

    advantages, targets = by_rows(mask, values, of_rows, 2)
    return advantages, targets


@torch.no_grad()
def segment_log_ratio(
    log_ratio: Float[Tensor, "B T"], mask: Tensor, segment_ids: Int[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T"]:
    """Replace each sampled token's log-ratio by the mean over its segment: a `trace_log_ratio` by turn.

    The product of min(1, mean ratio) over a segment is min(1, the segment's ratio). So the trace is cut once per turn,
    by how much less likely the whole turn became, and not at every token whose noise is below 0.

    Args:
        log_ratio, mask: [B, T].
        segment_ids: [B, T] any integers; None uses the turns, that is, contiguous runs of sampled tokens.

    Returns:
        [B, T], 0 outside the mask.
    """
    inside = mask.bool()
    safe = torch.where(inside, log_ratio, torch.zeros_like(log_ratio))
    width = inside.shape[1]
    if segment_ids is None:
        begins = inside.clone()
        begins[:, 1:] &= ~inside[:, :-1]
        segment_ids = begins.long().cumsum(1)
    row = torch.arange(len(inside), device=inside.device)[:, None].expand(-1, width)
    pairs = torch.stack([row, segment_ids.long()], -1).reshape(-1, 2)
    unique, index = torch.unique(pairs, dim=0, return_inverse=True)
    index = index.reshape(-1)
    sums = safe.new_zeros(len(unique)).index_add(0, index, safe.reshape(-1))
    counts = safe.new_zeros(len(unique)).index_add(0, index, inside.reshape(-1).to(safe.dtype))
    means = (sums / counts.clamp(min=1))[index].reshape(safe.shape)
    return torch.where(inside, means, torch.zeros_like(means))
