"""What the settings of the data may be, as far as words and numbers tell."""

from __future__ import annotations

from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.problem import Problems
from asyncrl.checks.sources import sources
from asyncrl.errors import ConfigError
from asyncrl.schema import Config


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
    if data.args and not any(source.runs_own_code for source in (*found, *evaluated)):
        yield "data.args are given to a class of your own, and no path names one (file.py:Name). Leave them out"


RULES = (sources_are_some,)
