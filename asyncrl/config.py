"""`load_config()` turns Hydra overrides into the settings of `asyncrl.schema`. Nothing else reads Hydra.

It returns a plain `Config` (never a `DictConfig`) that `asyncrl.checks` has checked as a whole, before anything is
started. Importing this module loads neither torch nor ray.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl import spans
from asyncrl.checks.hints import FREE_FORM, explain_refused_value, refuse_unknown_keys
from asyncrl.checks.rules.learner import resolved_loss
from asyncrl.checks.rules.whole import check_config
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, RunSettings

Settings = TypeVar("Settings")
LOG_DIR = "logs"
JOURNAL_DIR = "journal"
"""Folder in the run folder. The replay server creates it, possibly before the learner has prepared the run folder."""
KEYS_DIR = "keys"
"""Folder in the run folder. The first process of the run creates it, unless `replay.keys` names another folder."""
UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException)
"""Errors raised by a file that is not valid YAML."""
MOST_VALUES = 10_000
"""Limit on the values of a settings file with YAML aliases: a few lines of aliases can expand to any number."""
SCORES_ITSELF = ("reasoning_gym", "gymnasium", "openai", "verifiers")
"""Shipped environments that compute rewards themselves, so that `reward.function` may be missing."""


def config_dir() -> Path:
    """The shipped `configs/`: inside the package if installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


@functools.cache
def config_keys(kind: type = Config, prefix: str = "") -> list[str]:
    """The dotted key of every setting, in the order of the dataclasses."""
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
    """The config groups (folders of `configs/`) that a user selects with `group=name`."""
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir())


def chosen_by_default() -> dict[str, str]:
    """Config group -> the name that `configs/config.yaml` selects in it."""
    chosen: dict[str, str] = {}
    for entry in _read_yaml(config_dir() / "config.yaml")["defaults"]:
        chosen |= entry if isinstance(entry, dict) else {}
    return {group: name for group, name in chosen.items() if name is not None}


def choice_values(group: str, name: str) -> dict[str, Any]:
    """The settings of `group=name` by dotted key, including those of other groups that its file selects.

    Raises:
        OSError: there is no such file.
    """
    found: dict[str, Any] = {}
    for _, values in choice_files(group, name):
        found |= values
    return found


def choice_files(group: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file that `group=name` includes, as `("group=name", settings by dotted key)`; later ones win.

    Raises:
        OSError: there is no such file.
    """
    file = config_dir() / group / f"{name}.yaml"
    values = _read_yaml(file)
    everywhere = file.read_text().startswith("# @package _global_")
    for entry in values.pop("defaults", []):
        chosen = entry.items() if isinstance(entry, dict) else [(group, entry)]
        for other, its_name in chosen:
            if its_name != "_self_":
                yield from choice_files(other.removeprefix("override /"), its_name)
    yield f"{group}={name}", by_key(values, "" if everywhere else f"{group}.")


def default_settings(kind: type = Config) -> dict[str, Any]:
    """The default of every setting, by dotted key; `???` for a required one."""
    found = by_key(config_to_dict(kind()))
    if kind is not Config:  # the only one with groups
        return found
    for group, name in chosen_by_default().items():
        found |= choice_values(group, name)
    return found


def by_key(values: Mapping[str, Any], prefix: str = "", *, apart: bool = False) -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`. A setting whose value is a mapping stays one, unless `apart` is true
    and it is not empty."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        whole = not isinstance(value, Mapping) or (key in FREE_FORM and not (apart and value))
        found |= {key: value} if whole else by_key(value, f"{key}.", apart=apart)
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a user's YAML file by dotted key, unchecked.

    Raises:
        ConfigError: the file cannot be read or is not a mapping.
    """
    try:
        return by_key(_read_yaml(path))
    except UNREADABLE as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error}. Write `key: value` lines in it"
        ) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    """Raises one of UNREADABLE."""
    text = path.read_text("utf-8")
    if "&" in text and "*" in text and _size(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MOST_VALUES:
        raise ValueError(f"its aliases (*NAME) stand for more than {MOST_VALUES:,} values")
    read = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(read, dict):
        raise ValueError("it holds a list, not settings")
    return cast(dict[str, Any], read)


def _size(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Number of values in a node, with aliases expanded: OmegaConf makes a copy for each use of an alias."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # of an alias within itself
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inside = [each for pair in parts for each in pair] if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = 1 + sum(_size(each, known) for each in inside)
    return known[id(node)]


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Compose `configs/config.yaml` with `overrides` (`key=value`, `group=name`) and check the result as a whole.

    Raises:
        ConfigError: see `compose_settings`; or a check refused a setting.
    """
    config = compose_settings(Config, "config", overrides, groups=config_groups(), not_needed=_not_needed)
    check_config(config)
    return config


def compose_settings(
    kind: type[Settings],
    file: str,
    overrides: Sequence[str],
    *,
    groups: Sequence[str] = (),
    not_needed: Callable[[Any], Iterable[str]] = lambda _: (),
) -> Settings:
    """Compose `configs/<file>.yaml` with `overrides` into the dataclass `kind`. Rules between settings are not checked.

    Args:
        groups: config groups that may be selected with `group=name`.
        not_needed: returns the required settings that may stay empty, given the composed ones.

    Raises:
        ConfigError: an unknown key or group, a value of the wrong type, a missing required key; the message says the
            rule, the value and the way out.
    """
    refuse_unknown_keys(overrides, known=config_keys(kind), groups=groups)
    chosen = tuple(text for text in overrides if text.partition("=")[0] in groups)
    try:
        node = copy.deepcopy(_composed(kind, file, chosen))
        _set_values(node, [text for text in overrides if text not in chosen])
        plain = cast(dict[str, Any], OmegaConf.to_container(node))
        # As `OmegaConf.missing_keys`, in an eighth of its time.
        missing = {key for key, value in by_key(plain).items() if value == MISSING}
        for key in missing.intersection(not_needed(node)):
            OmegaConf.update(node, key, "")
            missing.remove(key)
        if missing:
            given = " ".join(f"{key}=..." for key in sorted(missing))
            raise ConfigError(f"required settings are missing: {', '.join(sorted(missing))}. Give them: {given}")
        return cast(Settings, OmegaConf.to_object(node))
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra wraps OmegaConf's reason and says only "Error merging"; OmegaConf's own cause lacks the key.
        reason = str((isinstance(error, HydraException) and error.__cause__) or error)
        raise ConfigError(explain_refused_value(reason, overrides)) from error


@functools.lru_cache(maxsize=256)
def _composed(kind: type, file: str, chosen: tuple[str, ...]) -> DictConfig:
    """`configs/<file>.yaml` with the `chosen` files. Cached because it takes four fifths of the time; callers must copy
    the result before they change it."""
    _tell_schema(kind, file)
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
        return compose(config_name=file, overrides=list(chosen))


def _set_values(node: DictConfig, overrides: Sequence[str]) -> None:
    """Set each `key=value` (Hydra's grammar). The last one of a key wins."""
    for given in OverridesParser.create().parse_overrides([_addable(text) for text in overrides]):
        if given.is_sweep_override():
            raise HydraException(f"Ambiguous value for argument '{given.input_line}'")
        OmegaConf.update(node, given.key_or_group, given.value(), merge=True, force_add=given.is_force_add())


def _not_needed(node: Any) -> Iterator[str]:
    # A user's environment or agent may compute rewards itself. If it asks for a reward after all, it gets an error.
    environment = str(node.environment.name)
    if ":" in environment or environment in SCORES_ITSELF or node.reward.functions:
        yield "reward.function"
    if node.data.mixture:
        yield "data.path"


@functools.cache
def _tell_schema(kind: type, file: str) -> None:
    """Register the schema with Hydra, once per process."""
    ConfigStore.instance().store(name="schema" if kind is Config else f"{file}_schema", node=kind)


def _addable(override: str) -> str:
    """Prefix an override of a free-form mapping with `++`: Hydra adds no new key without it."""
    free = any(override.startswith((f"{key}=", f"{key}.")) for key in FREE_FORM)
    return f"++{override}" if free else override


def begin_trace(config: Config, role: str) -> None:
    """Start tracing this process if `telemetry.trace` is set."""
    if config.telemetry.trace:
        spans.begin(Path(config.run.dir).resolve() / LOG_DIR / spans.FOLDER, role)


def config_to_dict(config: Any) -> dict[str, Any]:
    """The settings as a plain nested dict, as written to `config.yaml` in the run folder."""
    return asdict(config)


def config_from_dict(values: dict[str, Any], source: str = "a config received from another process") -> Config:
    """The inverse of `config_to_dict`. `source` names where `values` came from, for the error.

    Raises:
        ConfigError: a key or type does not fit the schema.
    """
    try:
        node = OmegaConf.merge(_schema(), literal(values))
        return cast(Config, OmegaConf.to_object(node))
    except OmegaConfBaseException as error:
        key, (said, *_) = error.full_key, str(error).splitlines()  # the other lines are about its classes
        raise ConfigError(
            f"{source} does not fit this version of asyncrl: {f'{key}: ' if key else ''}{said}"
        ) from error


@functools.cache
def _schema() -> DictConfig:
    """The schema with its defaults. Cached because it takes two thirds of the time; `OmegaConf.merge` copies it."""
    return OmegaConf.structured(Config)


def read_config(path: Path) -> Config:
    """The settings of a run, from `config.yaml` in its folder.

    Raises:
        ConfigError: the file cannot be read or does not fit this version of asyncrl.
    """
    try:
        values = _read_yaml(path)
    except UNREADABLE as error:
        raise ConfigError(f"{path} cannot be read: {error}. Restore it from a copy") from error
    return config_from_dict(meant(values), str(path))


def settings_as_used(config: RunSettings) -> dict[str, Any]:
    """The settings as `config.yaml` shows them: all of them, with the values that the loss preset resolves to."""
    if not isinstance(config, Config):
        return config_to_dict(config)
    loss = {name: value for name, value in resolved_loss(config.loss).items() if value is not None}
    return config_to_dict(config) | {"loss": loss}


def to_yaml(settings: dict[str, Any]) -> str:
    """YAML text in which `${` is escaped as `\\${`, so that reading it as a settings file gives the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(literal(settings)))


def literal(value: Any) -> Any:
    """`value` escaped so that OmegaConf reads `${...}` in it as plain text, not as a reference."""
    return _texts(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def meant(value: Any) -> Any:
    """The inverse of `literal`. References written by hand stay text: a run folder may come from somebody else, and a
    reference to an environment variable would reveal a secret of its reader."""
    return _texts(value, lambda text: re.sub(r"((?:\\\\)*)\\\$\{", lambda found: found[1][::2] + "${", text))


def _texts(value: Any, changed: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _texts(part, changed) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(part, changed) for part in value]
    return changed(value) if isinstance(value, str) else value
