"""A second implementation of the composed loss, with every setting a parameter: float64 numpy, one sequence at a time.

`references.py` has each algorithm at its default settings, from its paper. This has the algebra of docs/losses.md, so
that every override key can be varied. Nothing here imports the code under test; settings come as attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.losses.references import Array, Batch, exp, per_sequence, rows


def turns(b: Batch) -> list[Array]:
    """Return the unbroken runs of loss tokens within the sequences."""
    found = []
    for index in rows(b):
        found += np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)
    return found


def at_level(b: Batch, d: Array, frozen: Array, level: str) -> Array:
    """Return the ratio of each token at `level`, from log-ratios `d`; `frozen` is what a stop-gradient holds."""
    if level == "token":
        return exp(d)
    if level == "sequence":
        return per_sequence(b, lambda i: exp(d[i].sum()))
    if level == "geometric":
        return per_sequence(b, lambda i: exp(d[i].mean()))
    if level == "gspo_token":
        return per_sequence(b, lambda i: exp(frozen[i].mean() + d[i] - frozen[i]))
    out = np.zeros_like(d)
    for i in turns(b):
        out[i] = exp(d[i].mean())
    return out


def narrowed(b: Batch, r: Array, share: float) -> tuple[Array, Array]:
    """Return c_- and c_+ of SAT for each token, as its authors write it, from the ratio without gradient."""
    d = np.log(np.where(b.mask, r, 1.0))
    found = sorted(abs(d[t]) for t in np.flatnonzero(b.mask))
    q = next((x for x in found if sum(y <= x for y in found) / len(found) >= share), 0.0)
    if q == 0:
        return np.ones_like(d), np.ones_like(d)

    def factor(u: Array) -> Array:
        return np.where(np.abs(d) > q, 1 / (1 + (u / q) ** 2), 1.0)

    return factor(np.maximum(-d, 0)), factor(np.maximum(d, 0))


def clip_tokens(b: Batch, r: Array, frozen: Array, s: Any) -> Array:
    """Return PPO's loss literally, with the two-sided cap on the unclipped ratio and the dual clip where A < 0."""
    a = b.advantages
    low, high = 1 - s.clip_low, 1 + s.clip_high
    if s.sat_quantile:
        down, up = narrowed(b, frozen, s.sat_quantile)
        low, high = 1 - s.clip_low * down, 1 + s.clip_high * up
    unclipped = r if s.delta is None else np.minimum(r, s.delta)
    loss = -np.minimum(unclipped * a, np.clip(r, low, high) * a)
    if s.dual_clip is None:
        return loss
    return np.where(a < 0, np.minimum(loss, -a * s.dual_clip), loss)


def divergence_held(a: Array, new: Array, old: Array, s: Any, kl: bool) -> Array:
    p, q = np.exp(new), np.exp(old)
    size = q * (old - new) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8)) if kl else np.abs(p - q)
    return ((a > 0) & (p > q) & (size > s.divergence_high)) | ((a < 0) & (p < q) & (size > s.divergence_low))


def surrogate(b: Batch, kind: str, cur: Array, sg: Array, s: Any) -> Array:
    """Return the loss of each token before weights, rejection and aggregation."""
    a = b.advantages
    if kind == "reinforce":
        return -a * cur
    edge = s.edge or ("E" if b.prox is None else "U")
    prox: Any = b.prox  # given where the edge has it
    old = b.mu if edge in ("B", "E") else prox
    new, held = (prox, prox) if edge == "B" else (cur, sg)
    d, frozen = new - old, held - old
    level = s.level or "token"
    r, fixed = at_level(b, d, frozen, level), at_level(b, frozen, frozen, level)
    if kind in ("clip", "m2po_areal"):
        return clip_tokens(b, r, fixed, s)
    if kind == "detached":
        return -np.clip(fixed, s.ratio_floor, s.ratio_cap) * a * cur
    if kind == "capped":
        return -np.minimum(r, s.ratio_cap) * a
    if kind == "tapered":
        return -np.where(a > 0, 1.0, np.clip(fixed, s.ratio_floor, s.ratio_cap)) * a * cur
    if kind == "band":
        return -np.where((fixed > s.band_low) & (fixed < s.band_high), fixed, 0.0) * a * cur
    if kind in ("divergence_tv", "divergence_kl"):
        held_back = divergence_held(a, held, old, s, kind == "divergence_kl")
        return -a * np.minimum(exp(frozen), s.ratio_cap) * cur * ~held_back
    if kind == "divergence_blind":
        gap = np.exp(held) - np.exp(old)
        return -a * exp(d) * ((gap <= s.divergence_high) & (-gap <= s.divergence_low))
    if kind == "gmpo":
        one_sided = np.where(a > 0, np.minimum(d, s.clip_high), np.where(a < 0, np.maximum(d, -s.clip_low), 0.0))
        return per_sequence(b, lambda i: -a[i].mean() * exp(one_sided[i].mean()))
    if kind == "sapo":
        tau = np.where(a > 0, s.tau_pos, s.tau_neg)
        return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))
    if kind == "vespo":
        w = per_sequence(b, lambda i: np.exp(np.clip(np.clip(frozen[i], -20, 20).sum(), np.log(1e-8), 20)))
        k, lam = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.0)
        return -np.exp(lam - lam * w) * w**k * a * cur
    if kind == "drpo":
        return -a * r + np.abs(a) * np.exp(old) * (r - 1) ** 2 / (2 * s.epsilon)
    if kind == "dro":
        return -(a * cur - s.beta / 2 * d**2)
    assert kind == "m2po_paper"
    outward = [t for t in np.flatnonzero(b.mask) if frozen[t] * a[t] > 0]
    left = sorted(outward, key=lambda t: frozen[t] ** 2)
    while left and np.mean([frozen[t] ** 2 for t in left]) > s.m2_tau:
        left.pop()
    dropped = np.isin(np.arange(len(a)), sorted(set(outward) - set(left)))
    return -a * exp(d) * ~dropped


def weights(b: Batch, kind: str, sg: Array, s: Any) -> Array:
    if s.weight in (None, "none"):
        return np.ones_like(sg)
    d = (sg if kind == "reinforce" else b.prox) - b.mu
    w = at_level(b, d, d, s.weight_level)
    inside = (w >= s.weight_low) & (w <= s.weight_high)
    if s.weight == "self_normalize":
        capped = np.minimum(w, s.weight_high)
        per_row = s.weight_level in ("sequence", "geometric")
        mean = np.mean([capped[i].mean() for i in rows(b)]) if per_row else capped[b.mask].mean()
        return capped / mean
    return {
        "truncate": np.minimum(w, s.weight_high),
        "clip": np.clip(w, s.weight_low, s.weight_high),
        "zero": np.where(inside, w, 0.0),
        "mask": inside * 1.0,
    }[s.weight]


def kept(b: Batch, kind: str, sg: Array, s: Any) -> Array:
    """Return the mask of loss tokens that are not rejected. Tokens of weight 0 are not rejected here."""
    keep, anchor = b.mask.copy(), (sg if b.prox is None else b.prox) - b.mu
    if s.opsm_delta is not None:
        drift = per_sequence(b, lambda i: (b.mu - sg)[i].mean())
        keep &= (b.advantages >= 0) | (drift <= s.opsm_delta)
    if s.max_age is not None:
        keep &= b.age <= s.max_age
    if s.veto is not None:
        keep &= per_sequence(b, lambda i: float(exp(anchor[i]).min() >= s.veto)) > 0
    if kind == "m2po_areal":
        left = sorted(np.flatnonzero(b.mask), key=lambda t: anchor[t] ** 2)
        while len(left) > 1 and np.mean([anchor[t] ** 2 for t in left]) >= s.m2_tau:
            left.pop()
        keep &= np.isin(np.arange(len(keep)), left)
    return keep


def aggregate(b: Batch, loss: Array, counted: Array, s: Any) -> float:
    """Aggregate `loss`, which is 0 wherever it does not count. `counted` are the tokens of the denominators."""
    parts = [np.flatnonzero((b.seq == n) & counted) for n in np.unique(b.seq)]
    parts = [i for i in parts if len(i)]
    sequences = max(len(parts), 1)
    if s.aggregation == "token_mean":
        return loss.sum() / max(counted.sum(), 1)
    if s.aggregation == "token_sum":
        return loss.sum()
    if s.aggregation == "seq_mean_token_mean":
        return sum(loss[i].mean() for i in parts) / sequences
    if s.aggregation == "seq_mean_token_sum":
        return loss.sum() / sequences
    if s.aggregation == "constant":
        return loss.sum() / (sequences * s.constant_length)
    groups = [np.flatnonzero((b.group == g) & counted) for g in np.unique(b.group)]
    return float(np.mean([loss[i].mean() for i in groups if len(i)] or [0.0]))


def kl_values(cur: Array, ref: Array, kind: str) -> Array:
    d = cur - ref
    return {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) + d - 1, "abs": np.abs(d)}[kind]


def beyond_rounding(cur: Array, other: Array, sg: Array) -> Array:
    """Differences of up to 1e-4 count as none."""
    return np.where(np.abs(sg - other) <= 1e-4, other, cur)


def loss_of(kind: str, loglinear: bool, s: Any) -> Callable[[Batch, Array, Array], float]:
    """Return the loss as a function of (batch, cur, sg) for a surrogate `kind` at the settings `s`."""

    def loss(b: Batch, cur: Array, sg: Array) -> float:
        if loglinear:
            share = np.where(b.age == 0, 1.0, 1.0 / np.maximum(b.age, 1))
            b = Batch(**{**vars(b), "prox": share * b.mu + (1 - share) * sg})
        w, keep = weights(b, kind, sg, s), kept(b, kind, sg, s)
        tokens = np.where(keep, w * surrogate(b, kind, cur, sg, s), 0.0)
        counted = b.mask
        if s.denominator == "renormalize":
            counted = keep & (w != 0) if s.weight in ("zero", "mask") else keep
        total = aggregate(b, tokens, counted, s)
        if s.kl_coef:
            estimator = (s.kl or "k3").removeprefix("ratio_")
            pulled = cur if estimator == "k1" else beyond_rounding(cur, b.ref, sg)
            penalty = kl_values(pulled, b.ref, estimator)
            if (s.kl or "").startswith("ratio_"):
                old = b.mu if (s.edge == "E" or b.prox is None or kind == "reinforce") else b.prox
                penalty = penalty * exp(cur - old)
            total += s.kl_coef * aggregate(b, np.where(b.mask, penalty, 0.0), b.mask, s)
        if s.behavior_kl:
            gap = beyond_rounding(cur, b.mu, sg) - b.mu
            total += s.behavior_kl * aggregate(b, np.where(b.mask, gap**2, 0.0), b.mask, s)
        return total

    return loss
