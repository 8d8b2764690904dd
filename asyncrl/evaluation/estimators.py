"""Estimates for one row what k samples would give, from the n that were drawn.

An estimate at k is the mean over all subsets of size k of the n samples, so it is unbiased for k independent samples.
`pass@k` is the estimator of Chen et al. 2021: 1 - C(n - c, k) / C(n, k).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SUBSETS = 256
"""Limit on the subsets whose majority votes are counted per row and k. If there are more, this many are drawn."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of `k` samples passes, given that `passed` of `samples` did.

    Raises:
        ValueError: not 1 <= k <= samples, or not 0 <= passed <= samples.
    """
    _check(samples, k)
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    # As a product: the binomial coefficients of 10,000 samples overflow a float.
    return 1.0 - math.prod((samples - passed - i) / (samples - i) for i in range(k)) if passed else 0.0


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of `k` samples, from the scores [n] of all samples. Raises ValueError unless 1 <= k <= n."""
    samples = len(scores)
    _check(samples, k)
    ordered = sorted(scores, reverse=True)
    expected, left = 0.0, 1.0
    for place, score in enumerate(ordered):
        # Probability that this one is in the subset, given that no better one is.
        chosen = min(1.0, k / (samples - place))
        expected += left * chosen * score
        left *= 1.0 - chosen
    return expected


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int, seed: int) -> float:
    """Expected score of the answer that most of `k` samples give.

    A sample without an answer (None) does not vote. Ties are broken at random, so tied answers count in equal parts. If
    no sample votes, a random sample wins. The score of an answer is the mean score of the samples that gave it.

    Args:
        answers: [n], the answers of the samples with `scores` [n].
        seed: for drawing subsets if there are more than `SUBSETS`.

    Raises:
        ValueError: lengths differ, or not 1 <= k <= n.
    """
    samples = len(scores)
    _check(samples, k)
    if len(answers) != samples:
        raise ValueError(f"{len(answers)} answers came for {samples} scores")
    known = sorted({answer for answer in answers if answer is not None})
    if not known or k == 1:
        return float(np.mean(scores))
    chosen = subsets(samples, k, seed)
    given = np.array([[answer == other for other in known] for answer in answers], np.float64)
    values = np.asarray(scores, np.float64)
    votes = given[chosen].sum(axis=1)
    """[subsets, answers]"""
    totals = (given * values[:, None])[chosen].sum(axis=1)
    most = votes.max(axis=1, keepdims=True)
    winners = (votes == most) & (most > 0)
    means = totals / np.maximum(votes, 1.0)
    won = (winners * means).sum(axis=1) / np.maximum(winners.sum(axis=1), 1)
    return float(np.where(most[:, 0] > 0, won, values[chosen].mean(axis=1)).mean())


def subsets(samples: int, k: int, seed: int) -> NDArray[np.int64]:
    """[S, k] indices of samples: all subsets of size `k`, or `SUBSETS` of them drawn with `seed` if there are more."""
    if math.comb(samples, k) <= SUBSETS:
        return np.array(list(itertools.combinations(range(samples), k)), np.int64)
    # The raw stream: numpy guarantees that it never changes.
    keys = np.random.Philox(key=seed % 2**64).random_raw(SUBSETS * samples).reshape(SUBSETS, samples)
    return np.argsort(keys, axis=1, kind="stable")[:, :k]


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the number of samples, {samples}; got {k}")
