"""Statistics of the ratios before anything is clipped or dropped: per edge, and by token age.

Everything is returned as `Sums`, which add up over micro-batches and ranks; `summarize()` turns them into metrics (a
mean of effective sample sizes would not be the effective sample size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from asyncrl.losses.ratios import LOG_RATIO_LIMIT, Tokens
from asyncrl.losses.surrogates import Shaped

MAX_AGES = 64
"""Ages above this share the last row of the staleness table."""

TOKEN_MOMENTS = ("offset", "offset_square", "log_square", "kl_k1", "kl_k3", "abs_error")
"""Means over the loss tokens of r - 1, (r - 1)^2, (log r)^2, -log r, r - 1 - log r, |r - 1|.

All are 0 if log r is 0, so tokens outside the mask contribute nothing, and near r = 1 there is no cancellation.
"""

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
LOG_RATIO_EDGES = (-LOG_RATIO_LIMIT, *(-each for each in reversed(_BOUNDS)), *_BOUNDS, LOG_RATIO_LIMIT)
"""Edges of the bins in which log-ratios are counted, in nats; values beyond the ends are in the first or last bin."""


@dataclass(slots=True)
class Sums:
    """Statistics of one call. The field that holds a number says how it is combined; all but the maxima are summed."""

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name -> (numerator, denominator); the metric is their quotient."""
    tokens: dict[str, Float[Tensor, " 7"]] = field(default_factory=dict)
    """Place -> the `TOKEN_MOMENTS`, each summed, and the number of tokens. For the metrics see `token_metrics`."""
    ages: dict[str, Float[Tensor, " 21"]] = field(default_factory=dict)
    """Age in versions -> `tokens` of the edge E at that age, the number of clipped ones, and the number in each bin of
    `LOG_RATIO_EDGES`."""
    sequences: dict[str, Float[Tensor, " 6"]] = field(default_factory=dict)
    """Place -> the sums of `sequence_sums`, from which `sequence_metrics` are computed."""
    maxima: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def edge_log_ratios(tokens: Tokens) -> dict[str, Float[Tensor, " T"]]:
    """Raw log-ratio of every edge that the inputs allow."""
    cur = tokens.cur.detach()
    edges = {"E": cur - tokens.mu}
    if tokens.prox is not None:
        edges |= {"B": tokens.prox - tokens.mu, "U": cur - tokens.prox}
    return edges


SEQUENCE_LIMIT = 300.0
"""Limit on the log-ratio of a whole sequence: the square of its exponential still fits into float64."""


def token_moments(log_ratio: Float[Tensor, " T"]) -> list[Float[Tensor, " T"]]:
    safe = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    offset = safe.expm1()
    return [offset, offset.square(), log_ratio.square(), -log_ratio, offset - safe, offset.abs()]


@torch.no_grad()
def diagnose(tokens: Tokens, shaped: Shaped, held: Mapping[str, Tensor]) -> Sums:
    """Statistics of one call. `held` maps reasons to token masks: weights out of bounds, and rejected tokens."""
    mask = tokens.mask.to(tokens.cur.dtype)
    count = mask.sum()
    sums = Sums()
    either = held_sums(sums, tokens, shaped, held, mask, count)
    for edge, log_ratio in edge_log_ratios(tokens).items():
        moments = token_moments(log_ratio)
        sums.tokens[f"ratio/{edge}"] = torch.stack([*(moment.sum() for moment in moments), count])
        sums.sequences[f"ratio/{edge}"] = sequence_sums(tokens, log_ratio)
        if mask.numel():
            sums.maxima[f"ratio/{edge}/max"] = log_ratio.max().clamp(max=LOG_RATIO_LIMIT).exp()
        if edge == "E" and tokens.raw.staleness is not None and mask.numel():
            columns = torch.stack([*moments, mask, torch.zeros_like(mask) if either is None else either])
            age_sums(sums, tokens, columns, log_ratio)
    for name, numbers in shaped.numbers.items():
        sums.means[name] = torch.where(tokens.mask, numbers.detach().to(mask.dtype), 0.0).sum(), count
    if tokens.raw.entropy is not None:
        entropy = torch.where(tokens.mask, tokens.raw.entropy.detach().to(mask.dtype), 0.0)
        sums.means["policy/entropy"] = entropy.sum(), count
    if tokens.ref is not None:
        back = (tokens.ref - tokens.cur.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sums.means["kl/reference"] = (back.expm1() - back).sum(), count
    return sums


def sequence_sums(tokens: Tokens, log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " 6"]:
    """Sums over the sequences with a loss token, float64: the product of the token ratios, its square, both again with
    the wider limit used for effective sample sizes, the gap in log-perplexity, and the number of these sequences."""
    parts = tokens.sequences
    present = (parts.tokens > 0).to(log_ratio.dtype)
    total = parts.sum(log_ratio)
    weight = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * present
    # Wider than the clamp, at which all distant sequences would have equal weights and a full effective sample size.
    wide = total.double().clamp(-SEQUENCE_LIMIT, SEQUENCE_LIMIT).exp() * present
    gap = -total / parts.tokens.clamp(min=1)
    each = (weight, weight.square(), wide, wide.square(), gap, present)
    return torch.stack([numbers.sum().double() for numbers in each])


def held_sums(
    sums: Sums, tokens: Tokens, shaped: Shaped, held: Mapping[str, Tensor], mask: Tensor, count: Tensor
) -> Tensor | None:
    """Add the fractions of loss tokens clipped by the surrogate, by side, and of those in `held`, by reason and sign of
    A.

    Returns 1 at each loss token clipped on either side; None for a surrogate that does not clip.
    """
    either: Tensor | None = None
    if shaped.sides is not None:
        for side, tensor in zip(("low", "high"), shaped.sides(), strict=True):
            if tensor is not None:
                clipped = tensor * mask
                sums.means[f"policy/clip_{side}"] = clipped.sum(), count
                either = clipped if either is None else torch.maximum(either, clipped)
    if either is not None:
        sums.means["policy/clip_fraction"] = either.sum(), count
    positive = (tokens.advantages > 0) * mask
    for reason, tensor in held.items():
        sums.means[f"policy/{reason}"] = (tensor * mask).sum(), count
        sums.means[f"policy/{reason}_positive"] = (tensor * positive).sum(), count
    return either


def age_sums(sums: Sums, tokens: Tokens, columns: Float[Tensor, "8 T"], log_ratio: Float[Tensor, " T"]) -> None:
    """The edge E by token age, which shows at what age data stops helping. `columns`: the moments, mask, clipped."""
    assert tokens.raw.staleness is not None
    age = (tokens.raw.staleness.long() * tokens.mask).clamp(0, MAX_AGES)
    bounds = tokens.raw.bounds
    known = age[tokens.mask].unique().tolist() if bounds is None else {min(each, MAX_AGES) for each in bounds.ages}
    ages = max(known, default=0) + 1
    table = columns.new_zeros(len(columns), ages).index_add(1, age, columns)
    inner = _inner_edges(log_ratio.dtype, log_ratio.device)
    bins = torch.bucketize(log_ratio, inner, right=True) + age * (len(inner) + 1)
    binned = columns.new_zeros(ages * (len(inner) + 1)).index_add(0, bins, columns[-2]).view(ages, -1)
    largest = log_ratio.new_full((ages,), -LOG_RATIO_LIMIT).scatter_reduce(0, age, log_ratio, "amax")
    for index in sorted(known):
        sums.ages[str(index)] = torch.cat([table[:, index], binned[index]])
        sums.maxima[f"staleness/age_{index}/max"] = largest[index].clamp(max=LOG_RATIO_LIMIT).exp()


@cache
def _inner_edges(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, because each copy from the host would synchronise with the device."""
    return torch.tensor(LOG_RATIO_EDGES[1:-1], dtype=dtype).to(device, non_blocking=True)


def summarize(sums: Sums) -> dict[str, Tensor]:
    """Metrics of summed statistics: means, and functions of means.

    In addition to those that `sums` names: `kl/behavior` is the k3 estimate of KL(behavior || learner), and
    `token_share` the fraction of all loss tokens that have an age.
    """
    metrics = {name: numerator / denominator.clamp(min=1) for name, (numerator, denominator) in sums.means.items()}
    for place, moments in sums.tokens.items():
        metrics |= {f"{place}/{name}": value for name, value in token_metrics(moments).items()}
    for age, numbers in sums.ages.items():
        *moments, count, clipped = numbers[: len(TOKEN_MOMENTS) + 2]
        of_age = token_metrics(torch.stack([*moments, count]))
        of_age |= {"clip_fraction": clipped / count, "token_share": count / sums.tokens["ratio/E"][-1]}
        metrics |= {f"staleness/age_{age}/{name}": value for name, value in of_age.items()}
    for place, moments in sums.sequences.items():
        metrics |= {f"{place}/{name}": value for name, value in sequence_metrics(moments).items()}
    if "ratio/E" in sums.tokens:
        metrics["kl/behavior"] = metrics["ratio/E/kl_k3"]
    return metrics | sums.maxima


def ratio_counts(numbers: Sequence[float]) -> Sequence[float]:
    """The number of tokens in each bin of `LOG_RATIO_EDGES`, from a value of `Sums.ages`."""
    return numbers[len(TOKEN_MOMENTS) + 2 :]


def token_metrics(moments: Float[Tensor, " 7"]) -> dict[str, Tensor]:
    """Metrics of the token ratios r: `chi2_token` is mean r^2 - 1, `ess_token` the effective sample size divided by the
    number of tokens, (mean r)^2 / mean r^2, `rms_log_ratio` the root of mean (log r)^2."""
    offset, offset_square, log_square, kl_k1, kl_k3, abs_error = moments[:-1] / moments[-1].clamp(min=1)
    square = (1 + 2 * offset + offset_square).clamp(min=torch.finfo(moments.dtype).tiny)
    return {
        "mean": 1 + offset,
        "chi2_token": 2 * offset + offset_square,
        "ess_token": ((1 + offset).square() / square).clamp(max=1),
        "rms_log_ratio": log_square.sqrt(),
        "kl_k1": kl_k1,
        "kl_k3": kl_k3,
        "abs_error": abs_error,
    }


def sequence_metrics(moments: Float[Tensor, " 6"]) -> dict[str, Tensor]:
    """Metrics of the sequence ratios, which are the products of their tokens' ratios; names as in `token_metrics`."""
    mean, square, wide, wide_square, gap = moments[:-1] / moments[-1].clamp(min=1)
    effective = wide.square() / wide_square.clamp(min=torch.finfo(moments.dtype).tiny)
    return {"seq_mean": mean, "chi2_seq": square - 1, "ess_seq": effective, "log_ppl_gap": gap}


def ess_lr_scale(ess_seq: float) -> float:
    """VCPO: factor of the learning rate, sqrt(min(1, ESS/N)) of the sequence weights."""
    return min(1.0, max(ess_seq, 0.0)) ** 0.5
