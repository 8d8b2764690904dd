"""Random batches for the loss tests, and their conversion to `LossInputs`."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.losses import LossInputs
from tests.losses.references import Batch


def random_batch(
    seed: int, noise: float = 0.4, proximal: bool = True, sequences: int = 7, longest: int = 6, small: float = 0.02
) -> Batch:
    """Return sequences of 1 to `longest` tokens in groups of up to 3: tokens masked at random, one sequence masked
    whole, one alone in its group.

    Advantages are equal within a sequence in half of the batches and differ by token in the others.
    Half of the sequences have log-ratios of scale `small`, so that bands as narrow as those of geo_rs keep some.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, sequences)
    seq = np.repeat(np.arange(sequences), lengths)
    group = np.minimum(seq // 3, (sequences - 1) // 3)
    mask = rng.random(len(seq)) < 0.8
    mask[seq == 1] = False
    mask[seq == 0] = True
    cur = -3 * rng.random(len(seq)) - 0.05
    scale = np.where(rng.random(sequences) < 0.5, noise, small)[seq]
    mu = np.minimum(cur + scale * rng.standard_normal(len(seq)), -1e-3)
    prox = np.minimum(cur + 0.5 * scale * rng.standard_normal(len(seq)), -1e-3) if proximal else None
    if prox is not None:
        prox = np.where((seq % 4 == 0), mu + 1e-4 * rng.standard_normal(len(seq)), prox)
    advantages = rng.standard_normal(len(seq)) if seed % 2 else rng.standard_normal(sequences)[seq]
    advantages[seq == 2] = 0.0
    ref = cur + 0.3 * rng.standard_normal(len(seq))
    age = rng.integers(0, 5, len(seq))
    return Batch(cur, mu, advantages, mask, seq, group, prox, ref, age)


def to_inputs(b: Batch, dtype: torch.dtype = torch.float64, ref: bool = False) -> LossInputs:
    """Return the tensors of a batch. `learner_logprobs` is a leaf that requires grad."""

    def floats(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=dtype)

    cur = torch.tensor(b.cur, dtype=dtype, requires_grad=True)
    mu, advantages = floats(b.mu), floats(b.advantages)
    assert mu is not None and advantages is not None
    return LossInputs(
        learner_logprobs=cur,
        behavior_logprobs=mu,
        advantages=advantages,
        loss_mask=torch.tensor(b.mask),
        sequence_ids=torch.tensor(b.seq),
        group_ids=torch.tensor(b.group),
        proximal_logprobs=floats(b.prox),
        ref_logprobs=floats(b.ref) if ref else None,
        staleness=torch.tensor(b.age),
    )


def take(b: Batch, index: np.ndarray) -> Batch:
    """Return a batch of the tokens at `index`, in that order."""
    prox = None if b.prox is None else b.prox[index]
    return Batch(
        b.cur[index],
        b.mu[index],
        b.advantages[index],
        b.mask[index],
        b.seq[index],
        b.group[index],
        prox,
        b.ref[index],
        b.age[index],
    )
