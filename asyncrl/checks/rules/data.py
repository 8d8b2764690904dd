"""Rules for the settings of the data, without reading any rows."""

from __future__ import annotations

import math

from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.problem import Problems
from asyncrl.checks.sources import sources
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

LEAST_EXPLORED = 0.001
"""Smallest `data.curriculum_explore`: with less, the replay server would skip thousands of rows for one group."""


def sources_are_some(config: Config) -> Problems:
    data = config.data
    if data.mixture and data.path:
        yield f"data.path={data.path} and data.mixture both name what is trained on. Leave one of them out"
    if not data.prompt_column:
        yield "data.prompt_column must not be empty. Leave it out for `prompt`"
    try:
        found = sources(data)
    except ConfigError as error:
        yield str(error)
        return
    try:
        evaluated = [each.source for each in eval_sets(config)]
    except ConfigError:
        return  # refused by evaluation_has_rows
    if data.args and not any(source.runs_user_code for source in (*found, *evaluated)):
        yield "data.args are arguments for a class of your own, but no path names one (file.py:Name). Leave them out"


def curriculum_can_be_kept(config: Config) -> Problems:
    data = config.data
    if data.curriculum not in ("", "pass_rate"):
        yield f"data.curriculum={data.curriculum} is unknown. Give pass_rate, or leave it out"
    window = data.curriculum_window
    if len(window) != 2 or not 0 <= window[0] <= window[1] <= 1:
        yield f"data.curriculum_window={window} must be two pass rates, from 0 to 1. Example: [0.1,0.9]"
    if not LEAST_EXPLORED <= data.curriculum_explore <= 1:
        yield (
            f"data.curriculum_explore={data.curriculum_explore:g} must be between {LEAST_EXPLORED:g} and 1. Otherwise "
            "rows that have become solvable are never drawn again. The default is 0.1"
        )
    if not math.isfinite(data.curriculum_passes_at):
        yield (
            f"data.curriculum_passes_at={data.curriculum_passes_at} must be a finite number, the lowest reward that "
            "passes. The default is 0.5"
        )
    if data.curriculum and data.order_by:
        yield (
            f"data.order_by={data.order_by} and data.curriculum={data.curriculum} both say which rows come first. "
            "Leave one of them out"
        )


RULES = (sources_are_some, curriculum_can_be_kept)
