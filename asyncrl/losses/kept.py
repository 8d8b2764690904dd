"""The first of two passes of a loss that divides by what it keeps: what the whole optimizer batch keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asyncrl.losses.compose import kept_tokens, weight_log_ratio, with_anchor
from asyncrl.losses.config import find_preset, resolve
from asyncrl.losses.inputs import Denominators, Kept, LossInputs
from asyncrl.losses.m2po import m2po_limit
from asyncrl.losses.ratios import Tokens, make_safe
from asyncrl.losses.rejection import anchor_log_ratio, rejections
from asyncrl.losses.settings import LossConfig
from asyncrl.losses.weights import behavior_weight


def needs_first_pass(config: LossConfig) -> bool:
    """Whether `policy_loss` asks for `kept` beside global denominators."""
    return resolve(config).denominator == "renormalize"


@torch.no_grad()
def first_pass(
    inputs: Sequence[LossInputs], config: LossConfig, gather: Callable[[Tensor], Tensor] = lambda mine: mine
) -> Kept:
    """What of an optimizer batch is kept.

    Args:
        inputs: its micro-batches; of one rank, where `gather` adds the others'.
        gather: [n] float64 of this rank -> those of all ranks, end to end.
    """
    row, config = find_preset(config.preset), resolve(config)
    batches = [with_anchor(make_safe(batch), row) for batch in inputs]
    limit = torch.inf
    if config.preset == "m2po_areal":
        squares = [anchor_log_ratio(tokens).double().square()[tokens.mask] for tokens in batches]
        limit = m2po_limit(gather(torch.cat(squares)), config.m2_tau or 0.0)
    parts = []
    for tokens in batches:
        held: dict[str, Tensor] = {}
        if config.weight != "none":
            _, below, above = behavior_weight(tokens, config, weight_log_ratio(tokens, row))
            held = {"low": below, "high": above}
        parts.append(_by_sequence(tokens, kept_tokens(tokens, config, rejections(tokens, config, limit), held)))
    groups, kept = gather(torch.cat(parts).flatten()).view(-1, 2).unbind(1)
    group_tokens = torch.bincount(groups.long(), kept)
    counts = Denominators(
        tokens=float(kept.sum()), sequences=float((kept > 0).sum()), groups=float((group_tokens > 0).sum())
    )
    return Kept(counts, group_tokens, limit)


def _by_sequence(tokens: Tokens, keep: Bool[Tensor, " T"]) -> Float[Tensor, "sequences 2"]:
    """Group and kept tokens of each sequence."""
    parts = dataclasses.replace(tokens, mask=keep, _parts={}).sequences
    groups = torch.zeros(parts.count, dtype=torch.int64, device=keep.device)
    if tokens.raw.group_ids is not None:
        groups.scatter_(0, parts.index, tokens.raw.group_ids.long())
    return torch.stack([groups.double(), parts.tokens.double()], 1)
