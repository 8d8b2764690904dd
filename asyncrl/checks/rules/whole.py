"""All rules for a configuration, one small function each. All problems are reported at once.

A rule yields messages with the rule, the value and the way out. Rules only use numbers and words, so that any process
can check anywhere; `asyncrl.checks.machine` checks what a role needs on its machine.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.checks.hints import join_problems
from asyncrl.checks.problem import Problems
from asyncrl.checks.rules import data, engine, learner, replay, sampling, settings
from asyncrl.checks.rules.switches import switches_are_on
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

RULES: tuple[Callable[[Config], Problems], ...] = (
    *settings.RULES,
    *sampling.RULES,
    *data.RULES,
    *replay.RULES,
    *learner.RULES,
    *engine.RULES,
    switches_are_on,
)


def problems_of_rules(config: Config) -> list[str]:
    """Return all problems found by `RULES`."""
    return [problem for rule in RULES for problem in rule(config)]


def check_config(config: Config) -> None:
    """Raises ConfigError with all problems found by `RULES`."""
    if problems := problems_of_rules(config):
        raise ConfigError(join_problems(problems))
