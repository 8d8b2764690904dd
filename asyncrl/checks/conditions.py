"""`data.where`: selects rows by the values in their columns. Values are compared; nothing is evaluated.

data.where.level=[3,4,5]                    one of these      data.where.extra_info.split=train  in a nested column
data.where.score.min=0.2 ...score.max=0.8   both included      a column that is a list: any of its entries
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ConfigError

BOUNDS = {"min", "max"}
Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The value of a column must be one of `values`, or lie between the bounds."""

    column: tuple[str, ...]
    """Its name, after those of the columns that contain it."""
    key: str
    """The setting that the condition comes from, for errors."""
    values: tuple[Scalar, ...] = ()
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.values:
            only, *others = self.values
            return f"{self.key}={list(self.values) if others else only}"
        bounds = (("min", self.low), ("max", self.high))
        return " ".join(f"{self.key}.{name}={bound:g}" for name, bound in bounds if bound is not None)

    def holds(self, value: Any) -> bool:
        """Return whether a column's value meets the condition. None, the value of a missing column, never does.

        Raises:
            TypeError: the condition has bounds, and the value is not a number.
        """
        if isinstance(value, list):
            return any(self.holds(entry) for entry in value)
        if value is None:
            return False
        if self.values:
            # True == 1 in Python, but neither is meant by the other.
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{value!r:.80} is not a number")
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def conditions(where: Any, key: str) -> tuple[Condition, ...]:
    """Return the conditions in `where`.

    Args:
        key: the setting, for errors.

    Raises:
        ConfigError: it is not a mapping of columns to values.
    """
    if not isinstance(where, Mapping):
        raise ConfigError(f"{key} must be columns with their values, `{key}.COLUMN=VALUE`; got {where!r}")
    return tuple(found for name, value in where.items() for found in _conditions((str(name),), value, f"{key}.{name}"))


def _conditions(column: tuple[str, ...], value: Any, key: str) -> list[Condition]:
    if isinstance(value, Mapping) and value and set(value) <= BOUNDS:
        return [Condition(column=column, key=key, low=_bound(value, "min", key), high=_bound(value, "max", key))]
    if isinstance(value, Mapping) and value:
        return [found for name, part in value.items() for found in _conditions((*column, name), part, f"{key}.{name}")]
    values: tuple[Any, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or not all(isinstance(one, Scalar) for one in values):
        raise ConfigError(
            f"{key} must be a value, a list of values, or bounds ({key}.min, {key}.max); got {value!r}. Other "
            "conditions: write a class that gives the rows you want (data.path=FILE.py:NAME)"
        )
    return [Condition(column=column, key=key, values=values)]


def _bound(bounds: Mapping[str, Any], name: str, key: str) -> float | None:
    bound = bounds.get(name)
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
        raise ConfigError(f"{key}.{name} must be a number; got {bound!r}. Give the smallest and largest that counts")
    return bound
