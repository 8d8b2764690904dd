"""The sets that are evaluated during training: that of `eval.path`, and those of `eval.sets`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from asyncrl.checks.hints import refuse_others
from asyncrl.checks.sources import Source, sources
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, DataConfig, EnvironmentConfig, EvalConfig, RewardConfig

OF_THE_ROWS = ("prompt_column", "where", "args")
"""Settings of an entry's rows, corresponding to `data` for the training rows."""
NOT_OF_A_SET = ("sets", "name")
REWARD_HOSTS = ("host", "workers", "gpus", "concurrency", "max_failure_share")
"""Settings of `reward` that do not belong to one set."""

Settings = TypeVar("Settings", EvalConfig, EnvironmentConfig, RewardConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    name: str
    key: str
    """Prefix of its settings: `eval`, or `eval.sets.NAME`."""
    source: Source
    config: Config
    """The run's settings for this set, with its own `eval`, `environment`, `reward`, `data` and
    `rollout.max_new_tokens`."""


def eval_sets(config: Config) -> tuple[EvalSet, ...]:
    """Return the evaluated sets, that of `eval.path` first. Settings missing in an entry of `eval.sets` are taken from
    `eval`, `environment` and `reward`.

    Raises:
        ConfigError: an entry is invalid.
    """
    own = config.eval
    found = [_made("eval", own, config, {"path": own.path})] if own.path else []
    for name, given in own.sets.items():
        if own.path and str(name) == own.name:
            raise ConfigError(f"eval.sets.{name} and eval.path are both called {name}. Rename one: eval.name=NAME")
        found.append(_entry(str(name), given, config))
    return tuple(found)


def served_rewards(config: Config) -> dict[str, RewardConfig]:
    """Return the rewards that have a service of their own if `reward.host=ray`, by the set that they are for; the run's
    is under ``. Equal ones share the first."""
    found = {"": config.reward}
    for each in eval_sets(config):
        if each.config.reward not in found.values():
            found[each.name] = each.config.reward
    return found


def _entry(name: str, given: Any, config: Config) -> EvalSet:
    key = f"eval.sets.{name}"
    entry = {"path": given} if isinstance(given, str | list) else given
    if not isinstance(entry, Mapping) or not entry.get("path"):
        raise ConfigError(f"{key} has no path. Give {key}.path=FILE")
    of_eval = [item.name for item in fields(EvalConfig) if item.name not in NOT_OF_A_SET]
    known = [*of_eval, "environment", "reward", *OF_THE_ROWS]
    refuse_others(key, entry, known, "a set has")
    kept = {item: entry[item] for item in of_eval if item in entry and item != "path"}
    settings = replace(changed(config.eval, kept, key), name=name, path=entry["path"], sets={})
    own = replace(
        config,
        environment=_environment(config.environment, entry.get("environment", {}), f"{key}.environment"),
        reward=_reward(config.reward, entry.get("reward", {}), f"{key}.reward"),
    )
    return _made(key, settings, own, {item: entry[item] for item in ("path", *OF_THE_ROWS) if item in entry})


def _made(key: str, settings: EvalConfig, config: Config, rows: Mapping[str, Any]) -> EvalSet:
    """Build a set. Its rows are neither mixed nor ordered, and the filters of the training rows do not apply."""
    data = replace(config.data, mixture={}, where={}, order_by="", shuffle=False)
    data = _with_rows(data, rows, key)
    limit = settings.max_new_tokens or config.rollout.max_new_tokens
    rollout = replace(config.rollout, max_new_tokens=limit)
    (source,) = sources(data)
    view = replace(config, eval=replace(settings, sets={}), data=data, rollout=rollout)
    return EvalSet(name=settings.name, key=key, source=replace(source, key=f"{key}.path"), config=view)


def _with_rows(data: DataConfig, rows: Mapping[str, Any], key: str) -> DataConfig:
    for name, kind in (("prompt_column", str), ("where", Mapping), ("args", Mapping)):
        if name in rows and not isinstance(rows[name], kind):
            raise ConfigError(f"{key}.{name} must be {_said(kind)}; got {rows[name]!r}")
    return replace(data, **rows)


def _environment(base: EnvironmentConfig, given: Any, key: str) -> EnvironmentConfig:
    """Return the environment of a set. One with another name starts from the defaults, since the arguments of another
    environment mean nothing to it."""
    entry = _named(given, "name", key)
    return changed(EnvironmentConfig() if entry.get("name", base.name) != base.name else base, entry, key)


def _reward(base: RewardConfig, given: Any, key: str) -> RewardConfig:
    """Return the reward of a set. Another function starts from the defaults, except for the settings of processes."""
    entry = _named(given, "function", key)
    for name in REWARD_HOSTS:
        if name in entry:
            raise ConfigError(f"{key}.{name} applies to all rewards of the run. Set reward.{name}")
    if "function" in entry or "functions" in entry:
        hosts = {name: getattr(base, name) for name in REWARD_HOSTS}
        base = RewardConfig(**{"function": "", **hosts})
    return changed(base, entry, key)


def _named(given: Any, name: str, key: str) -> Mapping[str, Any]:
    """Return an entry as a mapping; a plain text is its name."""
    entry = {name: given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} must be a name, or settings as `{key}.{name}=NAME`; got {given!r}")
    return entry


def changed(base: Settings, given: Mapping[str, Any], key: str) -> Settings:
    """Return `base` with the given settings changed.

    Raises:
        ConfigError: there is no such setting, or a value has another type.
    """
    refuse_others(key, given, [item.name for item in fields(base)])
    values: dict[str, Any] = {}
    for name, value in given.items():
        kind = type(getattr(base, name))
        whole = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if not whole and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise ConfigError(f"{key}.{name} must be {_said(kind)}; got {value!r}")
        values[str(name)] = float(value) if whole else value
    return replace(base, **values)


def _said(kind: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a mapping")
