"""Pass rate of each row, as measured by groups: one byte per row, in integer arithmetic only.

Integers, so that replaying a journal gives the same rates on any machine.
"""

from __future__ import annotations

import zlib

import numpy as np

STEPS = 254
"""Resolution of the rates: finer than any group can measure."""


class PassRates:
    """Pass rates of `rows` rows. A byte is 0 if the row was never measured, else `1 + r` for the rate r / STEPS."""

    def __init__(self, rows: int) -> None:
        self._levels = np.zeros(rows, np.uint8)
        self._counts = np.zeros(STEPS + 2, np.int64)
        """Number of rows at each level, so that `summary` costs the same for any number of rows."""
        self._counts[0] = rows

    def __len__(self) -> int:
        return len(self._levels)

    def __getitem__(self, row: int) -> float | None:
        """None if the row was never measured."""
        level = int(self._levels[row])
        return None if level == 0 else (level - 1) / STEPS

    def measure(self, row: int, rate: float) -> None:
        """Record that a group of this row had pass rate `rate`. The first rate is stored as it is. A later one has
        weight three quarters, the stored rate one quarter, because the policy has changed. Rounded towards the new
        rate, so that it can be reached."""
        before, new = int(self._levels[row]), 1 + round(min(max(rate, 0.0), 1.0) * STEPS)
        level = new if before == 0 else (before + 3 * new + (3 if new > before else 0)) // 4
        self._counts[before] -= 1
        self._counts[level] += 1
        self._levels[row] = level

    def summary(self, low: float, high: float) -> dict[str, float]:
        """`measured` is a share of all rows; the others, with the bounds `low` and `high`, are of the measured ones."""
        measured = int(self._counts[1:].sum())
        if not measured:
            return {"measured": 0.0}
        rates = np.arange(STEPS + 1) / STEPS
        counts = self._counts[1:]
        return {
            "measured": measured / len(self),
            "mean": float(counts @ rates) / measured,
            "below": int(counts[rates < low].sum()) / measured,
            "above": int(counts[rates > high].sum()) / measured,
        }

    def image(self) -> bytes:
        """At most a megabyte for a million rows; a few thousand bytes while few of them are measured."""
        return zlib.compress(self._levels.tobytes(), 1)

    @classmethod
    def load(cls, rows: int, image: bytes) -> PassRates:
        """Raises ValueError if `image` is not valid for `rows` rows."""
        try:
            decompressor = zlib.decompressobj()
            levels = np.frombuffer(decompressor.decompress(image, rows + 1), np.uint8)
        except zlib.error as error:
            raise ValueError(f"the pass rates cannot be read: {error}") from error
        if len(levels) != rows or int(levels.max(initial=0)) > STEPS + 1:
            raise ValueError(f"the pass rates are of {len(levels)} rows, not {rows}")
        loaded = cls(rows)
        loaded._levels = levels.copy()
        loaded._counts = np.bincount(levels, minlength=STEPS + 2)
        return loaded
