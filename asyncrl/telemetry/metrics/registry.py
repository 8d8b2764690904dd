"""Every metric of a row of `metrics.jsonl`: its unit, its meaning, which way is better, and where it is made.

A name with `<...>` in it stands for many: `rewards/<name>` for each named component. What is made and is not here fails
a test, and so does what is here and is made nowhere.
"""

from __future__ import annotations

import re
from functools import cache

from asyncrl.telemetry.metrics.metric import Metric
from asyncrl.telemetry.metrics.of_runs import OF_RUNS
from asyncrl.telemetry.metrics.of_steps import OF_STEPS

OF_EVERY_ROW = ("step", "policy_version", "time", "crc")
"""What a row has beside its metrics: trained steps, the version they made, seconds since the epoch, a checksum."""


METRICS: tuple[Metric, ...] = (*OF_STEPS, *OF_RUNS)
"""All of them. Where several patterns fit a name, the one with the fewest placeholders is meant, see `metric_of`."""


@cache
def metric_of(name: str) -> Metric | None:
    """What is registered under this name, or a pattern that fits it."""
    fitting = [metric for metric in METRICS if pattern_of(metric.name).fullmatch(name)]
    return min(fitting, key=lambda metric: (metric.name.count("<"), -len(metric.name)), default=None)


PLAIN = "plain number"


def unit_of(name: str) -> str:
    """As one writes it beside an axis; a user's own metrics have none that is known."""
    known = metric_of(name)
    return known.unit if known is not None and known.unit != "1" else PLAIN


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """A placeholder stands for some characters other than `/`; `<name>` is a user's, who may write what he likes."""
    text = re.escape(name).replace("<name>", ".+")
    return re.compile(re.sub(r"<[a-z]+>", "[^/]+", text))
