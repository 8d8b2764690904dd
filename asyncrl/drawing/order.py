"""The row of the i-th prompt, as a pure function of (rows, settings, seed, i), so a resume needs no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.drawing.turns import Turns

APART = 0x9E3779B97F4A7C15
"""Distance between the seeds of two sources: with the same seed, sources of the same length would be shuffled alike."""


class Drawn(NamedTuple):
    source: int
    epoch: int
    """Epoch of this source: how often each of its rows has come before."""
    row: int
    """Row number within the source."""


class DrawOrder:
    """In each epoch of a source each of its rows comes once.

    Args:
        rows: number of rows of each source.
        weights: weight of each source.
        ranks: for each source, the rank of each row by `data.order_by`, [rows]; None if it has no such order. Rows of
            the same rank are shuffled among themselves.
    """

    def __init__(
        self,
        rows: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        ranks: Sequence[NDArray[np.int64] | None],
    ) -> None:
        self._rows, self._ranks = rows, ranks
        self._turns = Turns(weights)
        self._seed, self._shuffle = seed, shuffle
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __getitem__(self, index: int) -> Drawn:
        return self.drawn(*self._turns[index])

    def drawn(self, source: int, before: int) -> Drawn:
        """The row of `source` that comes after `before` others of the same source."""
        epoch, place = divmod(before, self._rows[source])
        if not self._shuffle and self._ranks[source] is None:
            return Drawn(source, epoch, place)
        return Drawn(source, epoch, int(self._order(source, epoch)[place]))

    def _order(self, source: int, epoch: int) -> NDArray[np.int64]:
        known = self._orders.get((source, epoch))
        if known is None:
            while len(self._orders) >= 2 * len(self._rows):  # groups in flight span at most two epochs, rarely more
                del self._orders[next(iter(self._orders))]
            known = self._orders[source, epoch] = self._made(source, epoch)
        return known

    def _made(self, source: int, epoch: int) -> NDArray[np.int64]:
        rows, ranks = self._rows[source], self._ranks[source]
        order = epoch_order(rows, self._seed + source * APART, epoch) if self._shuffle else np.arange(rows)
        return order if ranks is None else order[np.argsort(ranks[order], kind="stable")]


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `range(rows)` for this epoch.

    Built on the generator's raw stream, which numpy guarantees never to change. `Generator.permutation` may change with
    the numpy version, and a run resumed after an upgrade would then repeat some rows and skip others.
    """
    # In a list, seeds of 2**63 and above (those of every second source) would be rounded to floats.
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)).random_raw(rows)
    return np.argsort(keys, kind="stable")
