"""Every rule a configuration must keep, one small function each. All that is wrong is reported at once.

A rule yields what it found: the rule, the value, the way out. Only numbers and words are looked at, so that any
process can check anywhere; what a role needs on the machine it starts on is asked by `asyncrl.checks.machine`.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.checks.hints import join_problems
from asyncrl.checks.problem import Problems
from asyncrl.checks.rules import data, engine, layers, learner, replay, sampling, settings
from asyncrl.checks.rules.switches import switches_are_on
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

RULES: tuple[Callable[[Config], Problems], ...] = (
    *settings.RULES,
    *sampling.RULES,
    *data.RULES,
    *replay.RULES,
    *learner.RULES,
    *layers.RULES,
    *engine.RULES,
    switches_are_on,
)


def check_config(config: Config) -> None:
    """Raises ConfigError with everything that `RULES` found wrong."""
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError(join_problems(problems))
