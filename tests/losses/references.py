"""A second implementation of the named losses, from the papers' formulas: float64 numpy, a token or sequence at a time.

`cur` is differentiated by finite differences and `sg` (the same numbers) is what a stop-gradient would hold fixed.
Nothing here imports the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Batch:
    """Packed tokens, [T] each."""

    cur: Array
    mu: Array
    advantages: Array
    mask: Array
    seq: Array
    group: Array
    prox: Array | None
    ref: Array
    age: Array

    def old(self) -> Array:
        """Anchor of the surrogates that use U where they can and E where they cannot."""
        return self.mu if self.prox is None else self.prox


def exp(x: Any) -> Any:
    return np.exp(np.clip(x, -20.0, 20.0))


def rows(b: Batch) -> Iterator[Array]:
    """Yield the indices of the loss tokens of each sequence that has any."""
    for s in np.unique(b.seq):
        index = np.flatnonzero((b.seq == s) & b.mask)
        if len(index):
            yield index


def token_mean(b: Batch, loss: Array) -> float:
    return loss[b.mask].sum() / max(b.mask.sum(), 1)


def seq_mean_token_mean(b: Batch, loss: Array) -> float:
    return float(np.mean([loss[i].mean() for i in rows(b)] or [0.0]))


def seq_mean_token_sum(b: Batch, loss: Array) -> float:
    return float(np.mean([loss[i].sum() for i in rows(b)] or [0.0]))


def constant(b: Batch, loss: Array, length: float = 1024.0) -> float:
    return sum(loss[i].sum() for i in rows(b)) / (max(len(list(rows(b))), 1) * length)


def prompt_mean(b: Batch, loss: Array) -> float:
    groups = [np.flatnonzero((b.group == g) & b.mask) for g in np.unique(b.group)]
    return float(np.mean([loss[i].mean() for i in groups if len(i)] or [0.0]))


def clipped(a: Array | float, r: Array | float, low: float, high: float) -> Array:
    """max(-A r, -A clip(r))."""
    return np.maximum(-a * r, -a * np.clip(r, low, high))


def ppo_tokens(b: Batch, cur: Array, low: float, high: float, old: Array | None = None) -> Array:
    return clipped(b.advantages, exp(cur - (b.old() if old is None else old)), low, high)


def ppo(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, ppo_tokens(b, cur, 0.8, 1.2))


def dual_clip(b: Batch, cur: Array, sg: Array) -> float:
    loss = ppo_tokens(b, cur, 0.8, 1.2)
    return token_mean(b, np.where(b.advantages < 0, np.minimum(loss, -b.advantages * 3.0), loss))


def grpo(b: Batch, cur: Array, sg: Array) -> float:
    return seq_mean_token_mean(b, ppo_tokens(b, cur, 0.8, 1.2))


def dr_grpo(b: Batch, cur: Array, sg: Array) -> float:
    return constant(b, ppo_tokens(b, cur, 0.8, 1.2))


def dapo(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, ppo_tokens(b, cur, 0.8, 1.28))


def per_sequence(b: Batch, of: Callable[[Array], Array | float]) -> Array:
    """Give every loss token of a sequence `of(indices)`."""
    out = np.zeros_like(b.cur)
    for i in rows(b):
        out[i] = of(i)
    return out


def rloo(b: Batch, cur: Array, sg: Array) -> float:
    d = cur - b.old()
    return seq_mean_token_mean(b, per_sequence(b, lambda i: clipped(b.advantages[i], exp(d[i].sum()), 0.8, 1.2)))


def reinforce(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, -b.advantages * cur)


def gspo_sequence_loss(b: Batch, cur: Array) -> Array:
    d = cur - b.old()
    return per_sequence(b, lambda i: clipped(b.advantages[i], exp(d[i].mean()), 1 - 3e-4, 1 + 4e-4))


def gspo(b: Batch, cur: Array, sg: Array) -> float:
    return seq_mean_token_mean(b, gspo_sequence_loss(b, cur))


def gspo_token(b: Batch, cur: Array, sg: Array) -> float:
    d = sg - b.old()
    ratio = per_sequence(b, lambda i: exp(d[i].mean()) * np.exp(cur[i] - sg[i]))
    return seq_mean_token_mean(b, clipped(b.advantages, ratio, 1 - 3e-4, 1 + 4e-4))


def luspo(b: Batch, cur: Array, sg: Array) -> float:
    losses = [gspo_sequence_loss(b, cur)[i].mean() * len(i) for i in rows(b)]
    return float(np.mean(losses or [0.0]))


def cispo_tokens(b: Batch, cur: Array, sg: Array) -> Array:
    return -np.minimum(exp(sg - b.old()), 5.0) * b.advantages * cur


def cispo(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, cispo_tokens(b, cur, sg))


def scale_rl(b: Batch, cur: Array, sg: Array) -> float:
    return prompt_mean(b, cispo_tokens(b, cur, sg))


def gmpo(b: Batch, cur: Array, sg: Array) -> float:
    d = cur - b.old()
    losses = []
    for i in rows(b):
        total = 0.0
        for t in i:
            if b.advantages[t] > 0:
                total += min(d[t], 0.4)
            elif b.advantages[t] < 0:
                total += max(d[t], -0.4)
        losses.append(-b.advantages[i].mean() * exp(total / len(i)))
    return float(np.mean(losses or [0.0]))


def sapo(b: Batch, cur: Array, sg: Array) -> float:
    tau = np.where(b.advantages > 0, 1.0, 1.05)
    x = tau * (exp(cur - b.old()) - 1)
    return seq_mean_token_mean(b, -b.advantages * (4 / tau) / (1 + np.exp(-x)))


def vespo(b: Batch, cur: Array, sg: Array) -> float:
    d = np.clip(sg - b.mu, -20, 20)

    def loss(i: Array) -> Array:
        w = np.exp(np.clip(d[i].sum(), np.log(1e-8), 20.0))
        k = np.where(b.advantages[i] >= 0, 2.0, 3.0)
        lam = np.where(b.advantages[i] >= 0, 3.0, 2.0)
        return -np.exp(lam) * w**k * np.exp(-lam * w) * b.advantages[i] * cur[i]

    return token_mean(b, per_sequence(b, loss))


def prox_of(b: Batch) -> Array:
    assert b.prox is not None
    return b.prox


def decoupled_ppo(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, exp(prox_of(b) - b.mu) * ppo_tokens(b, cur, 0.8, 1.2))


def a3po(b: Batch, cur: Array, sg: Array) -> float:
    loss = np.zeros_like(cur)
    for t in np.flatnonzero(b.mask):
        a = 1.0 if b.age[t] == 0 else 1.0 / b.age[t]
        prox = a * b.mu[t] + (1 - a) * sg[t]
        loss[t] = exp(prox - b.mu[t]) * clipped(b.advantages[t], exp(cur[t] - prox), 0.8, 1.2)
    return token_mean(b, loss)


def tis(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, np.minimum(exp(prox_of(b) - b.mu), 2.0) * ppo_tokens(b, cur, 0.8, 1.2))


def sequence_ratio(b: Batch) -> Array:
    d = prox_of(b) - b.mu
    return per_sequence(b, lambda i: exp(d[i].sum()))


def seq_tis(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, np.minimum(sequence_ratio(b), 2.0) * ppo_tokens(b, cur, 0.8, 1.2))


def mis(b: Batch, cur: Array, sg: Array) -> float:
    w = sequence_ratio(b)
    return token_mean(b, np.where(w <= 3.0, w, 0.0) * ppo_tokens(b, cur, 0.8, 1.2))


def icepop(b: Batch, cur: Array, sg: Array) -> float:
    w = exp(prox_of(b) - b.mu)
    return token_mean(b, np.where((w >= 0.5) & (w <= 5.0), w, 0.0) * ppo_tokens(b, cur, 0.8, 1.2))


def dis(b: Batch, cur: Array, sg: Array) -> float:
    e = exp(sg - b.mu)
    return token_mean(b, -np.where((e > 0.7) & (e < 6.0), e, 0.0) * b.advantages * cur)


def geo_rs(b: Batch, cur: Array, sg: Array) -> float:
    """PPO without rejected sequences, which are left out of the denominator too."""
    d = prox_of(b) - b.mu
    keep = per_sequence(b, lambda i: float(0.999 <= exp(d[i].mean()) <= 1.001)) > 0
    return ppo_tokens(b, cur, 0.8, 1.2)[keep & b.mask].sum() / max((keep & b.mask).sum(), 1)


def opsm(b: Batch, cur: Array, sg: Array) -> float:
    drift = per_sequence(b, lambda i: (b.mu[i] - sg[i]).mean())
    keep = (b.advantages >= 0) | (drift <= 0.5)
    return seq_mean_token_mean(b, ppo_tokens(b, cur, 0.8, 1.2) * keep)


def outward(b: Batch, sg: Array) -> list[int]:
    """Return the loss tokens whose update moves the policy further away, by rising (log E)^2."""
    d = sg - b.mu
    found = [t for t in np.flatnonzero(b.mask) if (b.advantages[t] > 0 < d[t]) or (b.advantages[t] < 0 > d[t])]
    return sorted(found, key=lambda t: d[t] ** 2)


def m2po_paper(b: Batch, cur: Array, sg: Array) -> float:
    d, left = sg - b.mu, outward(b, sg)
    dropped = set()
    while left and np.mean([d[t] ** 2 for t in left]) > 0.04:
        dropped.add(left.pop())
    keep = np.array([t not in dropped for t in range(len(cur))])
    return token_mean(b, -b.advantages * exp(cur - b.mu) * keep)


def m2po_release(b: Batch, cur: Array, sg: Array) -> float:
    squares = np.array([(sg - b.mu)[t] ** 2 for t in outward(b, sg)])
    low, high = 0.0, np.inf
    if len(squares) and squares.mean() > 0.04:
        width = 0.0
        for candidate in squares:
            if np.minimum(squares, candidate).mean() >= 0.04:
                break
            width = np.sqrt(candidate - 1e-12)
        low, high = np.exp(-width), np.exp(width)
    return token_mean(b, clipped(b.advantages, exp(cur - b.mu), low, high))


def m2po_areal(b: Batch, cur: Array, sg: Array) -> float:
    """Drop tokens whatever the sign. Dropped tokens are left out of the denominator; the last token always stays."""
    d = b.mu - prox_of(b)
    left = sorted(np.flatnonzero(b.mask), key=lambda t: d[t] ** 2)
    while len(left) > 1 and np.mean([d[t] ** 2 for t in left]) >= 0.04:
        left.pop()
    return ppo_tokens(b, cur, 0.8, 1.2)[left].sum() / max(len(left), 1)


def topr(b: Batch, cur: Array, sg: Array) -> float:
    alpha = np.where(b.advantages > 0, 1.0, np.clip(exp(sg - b.mu), 0.0, 1.0))
    return token_mean(b, -alpha * b.advantages * cur)


def aipo(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, -np.minimum(exp(cur - b.mu), 4.0) * b.advantages)


def ipo(b: Batch, cur: Array, sg: Array) -> float:
    inside = np.abs(np.exp(sg) - np.exp(b.mu)) <= 0.1
    return token_mean(b, -b.advantages * exp(cur - b.mu) * inside + 1e-3 * (cur - b.mu) ** 2)


def dppo_tv(b: Batch, cur: Array, sg: Array) -> float:
    gap = np.exp(sg) - np.exp(b.mu)
    held = ((b.advantages > 0) & (gap > 0.2)) | ((b.advantages < 0) & (-gap > 0.2))
    return token_mean(b, -b.advantages * np.minimum(exp(sg - b.mu), 20.0) * cur * ~held)


def dppo_kl(b: Batch, cur: Array, sg: Array) -> float:
    p, q = np.exp(sg), np.exp(b.mu)
    distance = q * (b.mu - sg) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    away = ((b.advantages > 0) & (p > q)) | ((b.advantages < 0) & (p < q))
    return token_mean(b, -b.advantages * np.minimum(exp(sg - b.mu), 20.0) * cur * ~(away & (distance > 0.05)))


def drpo(b: Batch, cur: Array, sg: Array) -> float:
    e, q = exp(cur - b.mu), np.exp(b.mu)
    return token_mean(b, -b.advantages * e + np.abs(b.advantages) * q * (e - 1) ** 2 / (2 * 12.5))


def dro(b: Batch, cur: Array, sg: Array) -> float:
    return token_mean(b, -(b.advantages * cur - 0.1 / 2 * (cur - b.mu) ** 2))


def vcpo(b: Batch, cur: Array, sg: Array) -> float:
    d = sg - b.mu
    return token_mean(b, -per_sequence(b, lambda i: min(exp(d[i].sum()), 8.0)) * b.advantages * cur)


NEEDS_PROXIMAL = ("decoupled_ppo", "tis", "seq_tis", "mis", "icepop", "geo_rs", "m2po_areal")

REFERENCES: dict[str, Callable[[Batch, Array, Array], float]] = {
    "ppo": ppo,
    "dual_clip": dual_clip,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce": reinforce,
    "no_correction": reinforce,
    "reinforce_pp": ppo,
    "reinforce_pp_baseline": ppo,
    "remax": reinforce,
    "opo": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "cispo": cispo,
    "scale_rl": scale_rl,
    "gmpo": gmpo,
    "sapo": sapo,
    "vespo": vespo,
    "decoupled_ppo": decoupled_ppo,
    "a3po": a3po,
    "tis": tis,
    "seq_tis": seq_tis,
    "mis": mis,
    "icepop": icepop,
    "dis": dis,
    "geo_rs": geo_rs,
    "opsm": opsm,
    "m2po_paper": m2po_paper,
    "m2po_release": m2po_release,
    "m2po_areal": m2po_areal,
    "topr": topr,
    "aipo": aipo,
    "ipo": ipo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "drpo": drpo,
    "dro": dro,
    "vtrace": reinforce,
    "vcpo": vcpo,
}


def gradient(loss: Callable[[Batch, Array, Array], float], b: Batch, step: float = 1e-6) -> Array:
    """Return the gradient by central differences in `cur`, with the stop-gradients held at the batch's own values."""
    out = np.zeros_like(b.cur)
    for t in np.flatnonzero(b.mask):
        up, down = b.cur.copy(), b.cur.copy()
        up[t] += step
        down[t] -= step
        out[t] = (loss(b, up, b.cur) - loss(b, down, b.cur)) / (2 * step)
    return out
