"""Chooses the next prompt by how often the rows are solved (`data.curriculum=pass_rate`).

The stream of prompts is the same as without a curriculum, and each prompt keeps its position in it, but some are
skipped: each source has its own position in its part of the stream, and at its turn advances to the next row that is
worth a group. So a mixture keeps its shares, each epoch still visits each row once, and the state of a run is one
number per source.

    worth a group    rows never measured, and those whose pass rate lies in the window
    others           with probability `explore`, by a coin that is a function of the seed and the position: a row that
                     was solved once, or is hopeless now, is measured again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.drawing.order import DrawOrder
from asyncrl.drawing.pass_rates import PassRates
from asyncrl.drawing.turns import Turns

LONGEST_WALK = 100_000
"""Limit on the prompts skipped for one draw; the next one is taken. At `explore` 0.001 its probability is e^-100."""

MOST_ROWS = 1 << 24
"""Limit on the rows of a curriculum: it needs a byte per row, and a permutation of each source per epoch, which the
replay server computes between two requests (0.1 s for a million rows)."""


def too_many(rows: int) -> str:
    """Why there is no curriculum for this many rows; empty if there is one."""
    if rows <= MOST_ROWS:
        return ""
    return (
        f"data.curriculum keeps the pass rate of each row, of at most {MOST_ROWS:,}; there are {rows:,}. Choose rows "
        "with data.where, or leave data.curriculum out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The settings of the curriculum. They may change at a resume."""

    low: float
    high: float
    """Pass rates from `low` to `high`, both included, are worth a group."""
    explore: float
    """Share of the other rows that are drawn anyway when their turn comes; above 0."""
    passes_at: float
    """Lowest reward of a completion that passes."""
    weights: tuple[float, ...]
    """Weight of each source."""
    shuffle: bool

    def wants(self, rate: float | None) -> bool:
        return rate is None or self.low <= rate <= self.high

    def rate_of(self, rewards: Sequence[float]) -> float:
        """The share of members that passed, for at least one member."""
        return sum(reward >= self.passes_at for reward in rewards) / len(rewards)


class Draws:
    """Position in the stream, and what is known about its rows. Only `take` and `measure` change it.

    Args:
        rows: number of rows of each source.
        weights: weight of each source.
        drawn: number of turns taken before the curriculum began.
    """

    def __init__(
        self, rows: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool, drawn: int = 0
    ) -> None:
        self.rows, self.weights, self.seed, self.shuffle = tuple(rows), tuple(weights), seed % 2**64, shuffle
        self._turns = Turns(self.weights)
        self._order = DrawOrder(self.rows, self.weights, seed=seed, shuffle=shuffle, ranks=[None] * len(self.rows))
        self._starts = [sum(self.rows[:source]) for source in range(len(self.rows))]
        self.rates = PassRates(sum(self.rows))
        self.positions = self._turns.before(drawn)
        """For each source, the number of its prompts that were taken or skipped."""
        self.passed_over = 0

    def next(self, turn: int, wanted: Curriculum | None) -> int:
        """The prompt for this turn of the stream; without a curriculum (any more) the next one of its source."""
        source, _ = self._turns[turn]
        first = self.positions[source]
        index = self._turns.index_of(source, first)
        if wanted is None:
            return index
        for before in range(first, first + LONGEST_WALK):
            index = self._turns.index_of(source, before)
            rate = self.rates[self._row(source, before)]
            if wanted.wants(rate) or coin(self.seed, index) < wanted.explore:
                break
        return index

    def take(self, index: int) -> None:
        """Record that prompt `index` was drawn: its source continues after it."""
        source, before = self._turns[index]
        self.passed_over += max(0, before - self.positions[source])
        self.positions[source] = max(self.positions[source], before + 1)

    def measure(self, index: int, rate: float) -> None:
        """Record that a group of prompt `index` had pass rate `rate`."""
        self.rates.measure(self._row(*self._turns[index]), rate)

    def begun_at(self, drawn: int) -> Draws:
        """The same rows after `drawn` turns, with no pass rates known."""
        return Draws(self.rows, self.weights, seed=self.seed, shuffle=self.shuffle, drawn=drawn)

    def image(self) -> dict[str, Any]:
        """The state as plain values for msgpack; `load` restores it."""
        return {
            "rows": list(self.rows),
            "weights": list(self.weights),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "positions": list(self.positions),
            "passed_over": self.passed_over,
            "rates": self.rates.image(),
        }

    @classmethod
    def load(cls, image: dict[str, Any]) -> Draws:
        """Raises KeyError, TypeError or ValueError if `image` is not valid."""
        draws = cls(image["rows"], image["weights"], seed=image["seed"], shuffle=image["shuffle"])
        if len(image["positions"]) != len(draws.rows):
            raise ValueError(f"{len(image['positions'])} positions of {len(draws.rows)} sources")
        draws.positions, draws.passed_over = list(image["positions"]), image["passed_over"]
        draws.rates = PassRates.load(sum(draws.rows), image["rates"])
        return draws

    def _row(self, source: int, before: int) -> int:
        return self._starts[source] + self._order.drawn(source, before).row


def coin(seed: int, index: int) -> float:
    """A number in [0, 1), fixed for given arguments: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    bits = (seed ^ (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return ((bits ^ bits >> 31) >> 11) / 2**53
