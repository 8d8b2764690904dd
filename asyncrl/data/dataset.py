"""The data that prompts are drawn from: opens the configured sources and numbers their rows consecutively."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.sources import Source, sources
from asyncrl.data.rows.base import Row, joined
from asyncrl.data.rows.opening import open_source
from asyncrl.data.rows.view import SourceRows
from asyncrl.drawing.order import DrawOrder
from asyncrl.drawing.turns import Turns
from asyncrl.schema import DataConfig, RowSettings


class Dataset:
    """Rows of all sources, numbered consecutively in the order of the sources."""

    def __init__(self, parts: Sequence[SourceRows], order_by: str = "") -> None:
        self.parts = tuple(parts)
        self.starts = (0, *accumulate(len(part) for part in parts))
        """The number of the first row of each source, and at the end the total number of rows."""
        self._rows = joined(self.parts)
        self._ranks: list[NDArray[np.int64] | None] = [part.ranks(order_by) if order_by else None for part in parts]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> Row:
        """Raises DataError naming the row if it has no usable prompt."""
        return self._rows[row]

    def where(self, row: int) -> str:
        return self._rows.where(row)

    def order(self, *, seed: int, shuffle: bool) -> DrawOrder:
        """The order of the draws of a run."""
        weights = [part.source.weight for part in self.parts]
        return DrawOrder([len(part) for part in self.parts], weights, seed=seed, shuffle=shuffle, ranks=self._ranks)

    def close(self) -> None:
        self._rows.close()


def open_dataset(data: DataConfig) -> Dataset:
    """Open the training data. Raises DataError and ConfigError as `open_source`."""
    return Dataset([open_source(source) for source in sources(data)], data.order_by)


def open_alone(source: Source) -> Dataset:
    """Open a single source, in the order of its file. Raises DataError and ConfigError as `open_source`."""
    return Dataset([open_source(source)])


class SourceNames:
    """The name of the source of each prompt of a mixture, for processes that read no data."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = list(weights)
        self._turns = Turns(list(weights.values()))

    def __getitem__(self, index: int) -> str:
        return self._names[self._turns[index][0]]


def source_names(data: RowSettings) -> SourceNames | None:
    """Return None if there is no mixture."""
    return SourceNames({source.name: source.weight for source in sources(data)}) if data.mixture else None
