"""The first of two passes, for a loss that depends on all tokens of an optimizer batch or divides by what it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.losses.adaptive import tail_from
from asyncrl.losses.centering import weight_log_ratio
from asyncrl.losses.inputs import Denominators, Kept, LossInputs
from asyncrl.losses.m2po import m2po_clip_range, m2po_limit
from asyncrl.losses.ratios import Tokens, edge_ends, make_safe, surrogate_edge, with_anchor
from asyncrl.losses.rejection import anchor_log_ratio, kept_tokens, rejections
from asyncrl.losses.surrogates import log_ratio_of, outward_of
from asyncrl.losses.weights import behavior_weight, capped_weight
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import find_preset, resolve
from asyncrl.settings.loss.presets import Preset


@torch.no_grad()
def first_pass(
    inputs: Sequence[LossInputs], config: LossConfig, gather: Callable[[Tensor], Tensor] = lambda mine: mine
) -> Kept:
    """Counts of the kept tokens of an optimizer batch, and the statistics that its loss takes over all tokens.

    Args:
        inputs: its micro-batches; those of one rank, if `gather` adds the others'.
        gather: maps this rank's [n] to the concatenation over all ranks.
    """
    row, config = find_preset(config.preset), resolve(config)
    batches = [with_anchor(make_safe(batch), row) for batch in inputs]
    whole = _statistics(batches, config, row, gather)
    batches = [dataclasses.replace(tokens, whole=whole) for tokens in batches]
    parts = []
    for tokens in batches:
        held: dict[str, Tensor] = {}
        if config.weight != "none":
            _, below, above = behavior_weight(tokens, config, weight_log_ratio(tokens, row))
            held = {"low": below, "high": above}
        parts.append(_by_sequence(tokens, kept_tokens(tokens, config, rejections(tokens, config), held)))
    groups, kept = gather(torch.cat(parts).flatten()).view(-1, 2).unbind(1)
    group_tokens = torch.bincount(groups.long(), kept)
    tokens, sequences, used = torch.stack([kept.sum(), (kept > 0).sum(), (group_tokens > 0).sum()]).tolist()
    counts = Denominators(tokens=tokens, sequences=sequences, groups=used)
    return dataclasses.replace(whole, counts=counts, group_tokens=group_tokens)


def _statistics(batches: Sequence[Tokens], config: LossConfig, row: Preset, gather: Callable[[Tensor], Tensor]) -> Kept:
    """The statistics; the counts depend on them and are filled in later."""
    whole = Kept()
    bound = config.m2_tau or 0.0
    if row.surrogate == "m2po_areal":
        squares = [anchor_log_ratio(tokens).double().square()[tokens.mask] for tokens in batches]
        whole = dataclasses.replace(whole, m2_limit=m2po_limit(gather(torch.cat(squares)), bound, strict=True))
    elif row.batch_statistic:
        found = []
        for tokens in batches:
            edge = surrogate_edge(tokens, row, config)
            new, old = edge_ends(tokens, edge)
            found.append((new - old)[outward_of(tokens, edge)])
        outward = gather(torch.cat(found))  # in the loss's precision, in which the released clip range is determined
        if row.surrogate == "m2po_paper":
            whole = dataclasses.replace(whole, m2_limit=m2po_limit(outward.double().square(), bound))
        else:
            whole = dataclasses.replace(whole, m2_range=m2po_clip_range(outward, bound))
    if config.sat_quantile:
        far = [
            log_ratio_of(tokens, config, surrogate_edge(tokens, row, config)).abs()[tokens.mask] for tokens in batches
        ]
        whole = dataclasses.replace(whole, clip_tail=tail_from(gather(torch.cat(far)), config.sat_quantile))
    if config.weight == "self_normalize":
        sums = [torch.stack(capped_weight(tokens, config, weight_log_ratio(tokens, row))) for tokens in batches]
        total, count = gather(torch.stack(sums).sum(0)).view(-1, 2).sum(0).tolist()
        whole = dataclasses.replace(whole, mean_weight=total / max(count, 1.0))
    return whole


def _by_sequence(tokens: Tokens, keep: Bool[Tensor, " T"]) -> Float[Tensor, "sequences 2"]:
    """Group and number of kept tokens of each sequence."""
    parts = dataclasses.replace(tokens, mask=keep, _parts={}).sequences
    groups = torch.zeros(parts.count, dtype=torch.int64, device=keep.device)
    if tokens.raw.group_ids is not None:
        groups.scatter_(0, parts.index, tokens.raw.group_ids.long())
    return torch.stack([groups.double(), parts.tokens.double()], 1)
