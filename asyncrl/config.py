"""`load_config()`, the one door from Hydra to the settings of `asyncrl.schema`.

Past `load_config()` there is no `DictConfig`: a process gets a `Config` that was checked as a whole
(`asyncrl.checks`) before anything was started. Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.checks.whole import check_config
from asyncrl.errors import ConfigError
from asyncrl.hints import FREE_FORM, explain_refused_value, refuse_unknown_keys
from asyncrl.schema import Config

JOURNAL_DIR = "journal"
"""In the run folder; made by the replay server, perhaps before the learner has prepared the folder."""


def config_dir() -> Path:
    """The shipped `configs/`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def config_keys(kind: type = Config, prefix: str = "") -> list[str]:
    """Every setting as the dotted key a user types, in the order of the dataclasses."""
    types = get_type_hints(kind)
    keys: list[str] = []
    for item in fields(kind):
        inner = types[item.name]
        if isinstance(inner, type) and is_dataclass(inner):
            keys += config_keys(inner, f"{prefix}{item.name}.")
        else:
            keys.append(f"{prefix}{item.name}")
    return keys


def config_groups() -> list[str]:
    """Folders of `configs/`: what a user picks with `group=name`."""
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir())


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose `configs/config.yaml` with `overrides` (`key=value`, `group=name`) and check the result whole.

    Raises:
        ConfigError: an unknown key or group, a value of the wrong type, a missing required key, or a
            refused setting; the message says the rule, the value and the way out.
    """
    refuse_unknown_keys(overrides, known=config_keys(), groups=config_groups())
    _tell_schema()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            node = compose(config_name="config", overrides=[_addable(text) for text in overrides])
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            given = " ".join(f"{key}=..." for key in missing)
            raise ConfigError(f"required settings are missing: {', '.join(missing)}. Give them: {given}")
        OmegaConf.resolve(node)
        config = cast(Config, OmegaConf.to_object(node))
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra wraps OmegaConf's reason and says only "Error merging"; OmegaConf's own cause lacks the key.
        reason = str((isinstance(error, HydraException) and error.__cause__) or error)
        raise ConfigError(explain_refused_value(reason, overrides)) from error
    check_config(config)
    return config


@functools.cache
def _tell_schema() -> None:
    """To Hydra: for as long as the process lives."""
    ConfigStore.instance().store(name="schema", node=Config)


def _addable(override: str) -> str:
    """Hydra adds a key to a mapping only where it is told to, with `++`."""
    free = any(override.startswith((f"{key}=", f"{key}.")) for key in FREE_FORM)
    return f"++{override}" if free else override


OWN_TO_A_PROCESS = ("address", "shard_address", "keys", "durability", "max_restarts", "journal")
"""Settings of the replay that need not be the same for all."""


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings every process of a run must agree on. Paths count by their last part: each machine has its own."""
    return {
        "seed": config.seed,
        "model": [Path(config.model.path).name, config.model.lora_rank, config.model.lora_alpha],
        "data": [Path(config.data.path).name, config.data.shuffle, config.data.max_prompt_tokens],
        "environment": [Path(config.environment.name).name, config.reference.from_rollout],
        "reward": [Path(config.reward.function).name, Path(config.reward.model).name, config.reward.timeout_s],
        "rollout": [
            config.rollout.group_size,
            config.rollout.min_group_size,
            config.rollout.temperature,
            config.rollout.max_new_tokens,
        ],
        "replay": {key: value for key, value in asdict(config.replay).items() if key not in OWN_TO_A_PROCESS},
        "advantage": [config.advantage.baseline == "greedy", sorted(config.advantage.components)],
        "weights": [config.weights.transport, config.weights.wire_dtype],
        "learner": config.learner.groups_per_step,
        "eval": [Path(config.eval.path).name, config.eval.name, config.eval.rows],
    }


def run_digest(config: Config) -> str:
    """16 hex digits over `shared_settings`: the replay server refuses a peer that comes with another one."""
    text = json.dumps(shared_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict, as written to `config.yaml` in the run folder."""
    return asdict(config)


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `config_to_dict`, for processes that get their config from the one that started them.

    Raises:
        ConfigError: a key or a type that is not in the schema.
    """
    try:
        node = OmegaConf.merge(OmegaConf.structured(Config), values)
        return cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        raise ConfigError(f"a config received from another process does not fit this version: {error}") from error


def read_config(path: Path) -> Config:
    """The settings of a run, from the `config.yaml` in its folder.

    Raises:
        ConfigError: it does not fit this version of asyncrl.
    """
    return config_from_dict(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))))


def to_yaml(settings: dict[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(settings))
