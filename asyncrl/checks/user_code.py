"""Finds the settings that name a user's own code (`asyncrl.user_code`)."""

from __future__ import annotations

from asyncrl.checks.rewards import LIBRARY, reward_terms
from asyncrl.checks.sources import sources
from asyncrl.errors import ConfigError
from asyncrl.schema import Config
from asyncrl.user_code import code_fingerprint

CODE = "code"
"""Name under which the learner announces its own `workers_code`."""


def learner_code(config: Config) -> dict[str, str]:
    """Return `setting: file.py:name` of user code that runs in the learner."""
    named = {
        "loss.function": config.loss.function or "",
        "advantage.function": config.advantage.function,
        "learner.hook": config.learner.hook,
    }
    return {key: spec for key, spec in named.items() if spec}


def rollout_code(config: Config) -> dict[str, str]:
    """Return the same for user code that runs in the workers."""
    terms = [term for term in reward_terms(config.reward) if term.function not in LIBRARY.values()]
    named = {f"reward.functions.{term.name}" if term.name else "reward.function": term.function for term in terms}
    named |= {"environment.name": config.environment.name} if ":" in config.environment.name else {}
    named |= {f"rollout.filters[{place}]": spec for place, spec in enumerate(config.rollout.filters)}
    return named | {
        source.key: spec for source in sources(config.data) if source.runs_user_code for spec in source.specs
    }


def user_code(config: Config) -> dict[str, str]:
    """Return the same for every process of the run."""
    return rollout_code(config) | learner_code(config)


def workers_code(config: Config) -> dict[str, str]:
    """Return the `code_hashes` of user code that runs in the workers, for files that are on this machine; empty for
    settings without a reward or data, as in a learner that is assembled by hand."""
    try:
        specs = rollout_code(config)
    except ConfigError:
        return {}
    return {key: known for key, spec in specs.items() if (known := code_fingerprint(spec)) != spec}


def code_hashes(config: Config) -> dict[str, str]:
    """Return `setting: 16 hex digits` of the file that each setting names, see `code_fingerprint`."""
    return {key: code_fingerprint(spec) for key, spec in user_code(config).items()}
