"""The order of the sources of a mixture: which source the i-th prompt comes from, as a pure function of weights and i.

Turns repeat in rounds of at most `LONGEST_ROUND`. In a round each source has turns in proportion to its weight, spread
evenly: after any number of prompts, each source has had its share of them to within one. So every batch has the
mixture, and a resume needs only the index.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LONGEST_ROUND = 10_000
"""Limit on the turns of a round. Shares that need a longer round are rounded, by less than 0.01 % of all turns."""


class Turns:
    """The order of turns for given weights.

    Args:
        weights: weight of each source, above 0; only the ratios matter.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = round_counts(weights)
        """Number of turns of each source in a round."""
        self._round = np.asarray(spread(self.counts), np.int64)
        self._places = [np.flatnonzero(self._round == number) for number in range(len(self.counts))]
        # For each turn of the round, the number of earlier turns of its source in the round.
        self._before = np.zeros(len(self._round), np.int64)
        for number in range(len(self.counts)):
            self._before[self._places[number]] = np.arange(self.counts[number])

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the source of prompt `index`, and the number of prompts of that source before it."""
        rounds, place = divmod(index, len(self._round))
        number = int(self._round[place])
        return number, rounds * self.counts[number] + int(self._before[place])

    def index_of(self, source: int, before: int) -> int:
        """The prompt of this source that has `before` others of it before: the inverse of `self[index]`."""
        rounds, turn = divmod(before, self.counts[source])
        return rounds * len(self._round) + int(self._places[source][turn])

    def before(self, index: int) -> list[int]:
        """For each source, the number of its prompts among the first `index`."""
        rounds, place = divmod(index, len(self._round))
        part = np.bincount(self._round[:place], minlength=len(self.counts))
        return [rounds * count + int(some) for count, some in zip(self.counts, part, strict=True)]


def round_counts(weights: Sequence[float]) -> list[int]:
    """Turns per source in the shortest round with exactly the ratios of `weights`, or in the longest round allowed,
    with at least one turn each."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    divisor = math.gcd(*whole)
    whole = [each // divisor for each in whole]
    if sum(whole) <= LONGEST_ROUND:
        return whole
    total = sum(exact)
    ideal = [each / total * LONGEST_ROUND for each in exact]
    counts = [max(1, int(each)) for each in ideal]
    # Turns lost by rounding down go to the sources that lost most.
    by_loss = sorted(range(len(counts)), key=lambda number: (counts[number] - ideal[number], number))
    for number in by_loss[: max(0, LONGEST_ROUND - sum(counts))]:
        counts[number] += 1
    return counts


def spread(counts: Sequence[int]) -> list[int]:
    """A round with `counts[k]` turns of source k, evenly spread: after n turns each has had n * its share, within one.

    That bound gives an earliest and a latest position for the j-th turn of a source. Of the turns that may come now,
    the one with the earliest deadline is taken (earliest deadline first, which finds a valid order if there is one).
    """
    length = sum(counts)
    waiting = [(0, number, 0) for number in range(len(counts))]  # (earliest position, source, its turn)
    ready: list[tuple[int, int, int]] = []  # (deadline: position before which it must come, source, its turn)
    order: list[int] = []
    heapq.heapify(waiting)
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            _, number, turn = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(turn + 1) * length // counts[number]), number, turn))
        _, number, turn = heapq.heappop(ready)
        order.append(number)
        if turn + 1 < counts[number]:
            heapq.heappush(waiting, ((turn + 1) * length // counts[number], number, turn + 1))
    return order
