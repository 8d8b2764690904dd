"""Edges and levels: which log-ratio an operator acts on, and over which tokens it is taken.

All values stay in log space until a single clamped `exp`. At tokens outside the loss mask every log-ratio is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.losses.inputs import Kept, LossInputs
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.presets import Preset

LOG_RATIO_LIMIT = 20.0
"""Limit on |log-ratio| in `exp`: e^20 squared still fits into fp32. Beyond it the gradient is 0."""


@dataclass(slots=True)
class Segments:
    """A partition of the packed tokens (sequences, groups or turns), with sums over the loss tokens of each part."""

    index: Int[Tensor, " T"]
    """Part of each token, in [0, count)."""
    count: int
    mask: Bool[Tensor, " T"]
    dtype: torch.dtype
    _tokens: Float[Tensor, " count"] | None = None

    @property
    def tokens(self) -> Float[Tensor, " count"]:
        """Number of loss tokens in each part."""
        if self._tokens is None:
            self._tokens = self.sum(self.mask.to(self.dtype))
        return self._tokens

    def sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " count"]:
        """Sum of `values`, which must be 0 outside the loss mask, over each part."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: Float[Tensor, " T"]) -> Float[Tensor, " count"]:
        return self.sum(values) / self.tokens.clamp(min=1)

    def spread(self, values: Float[Tensor, " count"]) -> Float[Tensor, " T"]:
        """Give every token the value of its part."""
        return values.index_select(0, self.index)


def segments_of(
    ids: Int[Tensor, " T"], mask: Bool[Tensor, " T"], dtype: torch.dtype, above: int | None = None
) -> Segments:
    """Partition by `ids`; parts may have no loss tokens. Dense ids (the usual case) need no sort.

    Args:
        above: all ids are below it; None: read it from the ids.
    """
    if above is not None or ids.numel() == 0:
        return Segments(ids.long(), above or 1, mask, dtype)
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if high - low < 2 * ids.numel() + 1024:
        return Segments(ids.long() - low, high - low + 1, mask, dtype)
    unique, index = torch.unique(ids, return_inverse=True)
    return Segments(index, len(unique), mask, dtype)


@dataclass(slots=True)
class Tokens:
    """Sanitised `LossInputs`: float32 or float64, 0 outside the loss mask, a ratio of 1 without a recorded log-prob."""

    raw: LossInputs
    mask: Bool[Tensor, " T"]
    cur: Float[Tensor, " T"]
    mu: Float[Tensor, " T"]
    prox: Float[Tensor, " T"] | None
    ref: Float[Tensor, " T"] | None
    advantages: Float[Tensor, " T"]
    whole: Kept = field(default_factory=Kept)
    """Statistics of the optimizer batch that these tokens are part of, if the loss `needs_first_pass`."""
    _parts: dict[str, Segments] = field(default_factory=dict)

    @property
    def sequences(self) -> Segments:
        bounds = self.raw.bounds
        return self._part("sequences", self.raw.sequence_ids, bounds and bounds.sequences)

    @property
    def groups(self) -> Segments:
        if self.raw.group_ids is None:
            raise ConfigError(
                "loss.aggregation=prompt_mean needs group_ids in LossInputs; pass them, or use token_mean"
            )
        bounds = self.raw.bounds
        return self._part("groups", self.raw.group_ids, bounds and bounds.groups)

    @property
    def turns(self) -> Segments:
        """Contiguous runs of loss tokens within one sequence."""
        if "turns" not in self._parts:
            ids, mask = self.raw.sequence_ids, self.mask
            starts = mask.clone()
            starts[1:] &= ~mask[:-1] | (ids[1:] != ids[:-1])
            index = (starts.long().cumsum(0) - 1).clamp(min=0)
            # The largest possible number of parts: reading the actual one would synchronise with the GPU.
            self._parts["turns"] = Segments(index, max(1, index.numel()), mask, self.cur.dtype)
        return self._parts["turns"]

    def _part(self, name: str, ids: Tensor, above: int | None) -> Segments:
        if name not in self._parts:
            self._parts[name] = segments_of(ids, self.mask, self.cur.dtype, above)
        return self._parts[name]


def make_safe(inputs: LossInputs) -> Tokens:
    """Mask and sanitise once, so that later code never sees a NaN of a token that does not count.

    `where` comes before any arithmetic: if it came after, a NaN or overflow outside the mask would still make the
    gradient NaN (0 * inf). A NaN in `learner_logprobs` inside the mask is kept: it means a broken model and must reach
    the guard.
    """
    mask = inputs.loss_mask
    dtype = torch.float64 if inputs.learner_logprobs.dtype == torch.float64 else torch.float32
    cur = torch.where(mask, inputs.learner_logprobs.to(dtype), 0.0)
    mu = _anchor(inputs.behavior_logprobs, mask, cur)
    prox = None if inputs.proximal_logprobs is None else _anchor(inputs.proximal_logprobs, mask, cur)
    ref = None if inputs.ref_logprobs is None else _anchor(inputs.ref_logprobs, mask, cur)
    advantages = torch.where(mask, inputs.advantages.detach().to(dtype), 0.0)
    return Tokens(inputs, mask, cur, mu, prox, ref, advantages)


def _anchor(logprobs: Tensor, mask: Tensor, cur: Tensor) -> Tensor:
    """Detached log-probs; the current ones, detached, where none are recorded."""
    logprobs = logprobs.detach().to(cur.dtype)
    return torch.where(mask & (logprobs > -torch.inf), logprobs, cur.detach())


def edge_ends(tokens: Tokens, edge: str) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(new, old) log-probs of an edge: `B` prox/mu, `U` cur/prox, `E` cur/mu.

    Raises:
        ConfigError: B or U without proximal log-probs.
    """
    if edge == "E":
        return tokens.cur, tokens.mu
    if tokens.prox is None:
        raise ConfigError(
            f"loss edge {edge} needs proximal_logprobs in LossInputs and got None; pass them (with one update per "
            "batch they are learner_logprobs.detach()), or use edge=E"
        )
    return (tokens.prox, tokens.mu) if edge == "B" else (tokens.cur, tokens.prox)


def at_level(tokens: Tokens, log_ratio: Float[Tensor, " T"], level: str) -> Float[Tensor, " T"]:
    """Log-ratio at the token's `level`, clamped so that its `exp` is safe. Differentiable.

    `token`: its own; `sequence`: the product; `geometric`: the mean; `segment`: the mean over the turn; `gspo_token`:
    the value of the sequence's mean with the token's own gradient.
    """
    if level == "sequence":
        parts = tokens.sequences
        log_ratio = parts.spread(parts.sum(log_ratio))
    elif level in ("geometric", "segment"):
        parts = tokens.sequences if level == "geometric" else tokens.turns
        log_ratio = parts.spread(parts.mean(log_ratio))
    elif level == "gspo_token":
        parts = tokens.sequences
        log_ratio = parts.spread(parts.mean(log_ratio.detach())) + (log_ratio - log_ratio.detach())
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def probability(logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp, at most 1: an engine's rounding can make a log-prob positive, and invalid values must not overflow."""
    return logprobs.clamp(max=0).exp()


def with_anchor(tokens: Tokens, row: Preset) -> Tokens:
    """Compute the proximal policy of presets that define their own, and check that other presets were given theirs."""
    if row.anchor == "none" or (row.anchor == "proximal" and tokens.prox is not None):
        return tokens
    if row.anchor == "proximal":
        raise ConfigError(
            f"preset {row.name!r} needs proximal_logprobs in LossInputs and got None; pass them (with one update per "
            "batch they are learner_logprobs.detach()), or use a preset on the edge E such as dppo_tv, dis or ppo"
        )
    if tokens.raw.staleness is None:
        raise ConfigError(f"preset {row.name!r} makes its proximal policy from staleness; pass it in LossInputs")
    return replace(tokens, prox=loglinear_proximal(tokens, tokens.raw.staleness))


def surrogate_edge(tokens: Tokens, row: Preset, config: LossConfig) -> str:
    """The edge of the surrogate: as configured, otherwise U if there is a proximal policy, and E if not.

    Empty for `reinforce`, which has no ratio.
    """
    if row.surrogate == "reinforce":
        return ""
    edge = config.edge or ("E" if tokens.prox is None else "U")
    if edge != "U" and config.weight not in ("none", "mask"):
        raise ConfigError(
            f"loss.weight={config.weight} with the surrogate on edge {edge} counts proximal/behavior twice; pass "
            "proximal_logprobs and use edge=U, or set loss.weight=none"
        )
    return edge


def loglinear_proximal(tokens: Tokens, staleness: Int[Tensor, " T"]) -> Float[Tensor, " T"]:
    """The A-3PO anchor: log prox = a mu + (1 - a) sg[cur] with a = 1/staleness, and a = 1 for tokens of staleness 0."""
    share = 1.0 / staleness.clamp(min=1).to(tokens.cur.dtype)
    return torch.where(tokens.mask, share * tokens.mu + (1 - share) * tokens.cur.detach(), tokens.cur.detach())
