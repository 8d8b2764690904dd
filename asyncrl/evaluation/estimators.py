"""What k samples of a row would give, estimated from the n that were drawn: of each row by itself.

An estimate at k is the mean over all subsets of k of the n samples, hence unbiased for k independent samples.
`pass@k` is that of Chen et al. 2021 (1 - C(n - c, k) / C(n, k)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SUBSETS = 256
"""Majority votes counted for a row at one k; with more subsets than that, so many are drawn."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of `k` samples passes, when `passed` of `samples` did.

    Raises:
        ValueError: not 1 <= k <= samples, or not 0 <= passed <= samples.
    """
    _check(samples, k)
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")
    # As a product: the binomials of 10,000 samples are beyond a float.
    return 1.0 - math.prod((samples - passed - i) / (samples - i) for i in range(k)) if passed else 0.0


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of `k` samples, from the scores [n] of all. Raises ValueError unless 1 <= k <= n."""
    samples = len(scores)
    _check(samples, k)
    ordered = sorted(scores, reverse=True)
    expected, left = 0.0, 1.0
    for place, score in enumerate(ordered):
        # Whether this one is in the subset when none of the better ones is.
        chosen = min(1.0, k / (samples - place))
        expected += left * chosen * score
        left *= 1.0 - chosen
    return expected


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int, seed: int) -> float:
    """Expected score of the answer that most of `k` samples give.

    A sample without an answer (None) has no vote. Among answers with equally many votes one is taken by lot, so they
    count in equal parts; where nobody votes, a sample is. The winner has the mean score of the samples that gave it.

    Args:
        answers: [n], of the samples with `scores` [n].
        seed: draws the subsets, where they are more than `SUBSETS`.

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
    """[S, k] places of samples: all subsets of size `k`, or `SUBSETS` drawn with `seed` where they are more."""
    if math.comb(samples, k) <= SUBSETS:
        return np.array(list(itertools.combinations(range(samples), k)), np.int64)
    # The raw stream, which numpy promises never to change.
    keys = np.random.Philox(key=seed % 2**64).random_raw(SUBSETS * samples).reshape(SUBSETS, samples)
    return np.argsort(keys, axis=1, kind="stable")[:, :k]


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k must be between 1 and the number of samples, {samples}; got {k}")
