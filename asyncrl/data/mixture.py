"""Maps each prompt of a mixture to the name of its source (`drawing/turns.py` decides which source is next)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.checks.sources import sources
from asyncrl.drawing.turns import Turns
from asyncrl.schema import RowSettings


class SourceNames:
    """The name of the source of each prompt, for processes that read no data."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._names = list(weights)
        self._turns = Turns(list(weights.values()))

    def __getitem__(self, index: int) -> str:
        return self._names[self._turns[index][0]]


def source_names(data: RowSettings) -> SourceNames | None:
    """Return None if there is no mixture."""
    return SourceNames({source.name: source.weight for source in sources(data)}) if data.mixture else None
