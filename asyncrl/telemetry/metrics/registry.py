"""The registry of all metrics in rows of `metrics.jsonl`: unit, meaning, and which direction is better.

A name with `<...>` in it is a pattern: `rewards/<name>` stands for each named component. A test fails if a metric is
written that is not registered, or registered and never written.
"""

from __future__ import annotations

import re
from functools import cache

from asyncrl.telemetry.metrics.metric import Metric
from asyncrl.telemetry.metrics.of_runs import OF_RUNS
from asyncrl.telemetry.metrics.of_steps import OF_STEPS

OF_EVERY_ROW = ("step", "policy_version", "time")
"""Fields of a row other than metrics: trained steps, the policy version they led to, seconds since the epoch."""


METRICS: tuple[Metric, ...] = (*OF_STEPS, *OF_RUNS)
"""All metrics. If several patterns match a name, the one with the fewest placeholders applies, see `metric_of`."""


@cache
def metric_of(name: str) -> Metric | None:
    """Return the metric registered under this name, or under a pattern that matches it; None if there is none."""
    fitting = [metric for metric in METRICS if pattern_of(metric.name).fullmatch(name)]
    return min(fitting, key=lambda metric: (metric.name.count("<"), -len(metric.name)), default=None)


PLAIN = "plain number"


def unit_of(name: str) -> str:
    """Return the unit as an axis label; units of a user's own metrics are unknown."""
    known = metric_of(name)
    return known.unit if known is not None and known.unit != "1" else PLAIN


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """Return the pattern of a name. A placeholder matches characters other than `/`; `<name>` is chosen by users, and
    matches any characters."""
    text = re.escape(name).replace("<name>", ".+")
    return re.compile(re.sub(r"<[a-z]+>", "[^/]+", text))
