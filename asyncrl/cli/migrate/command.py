"""`asyncrl migrate verl|trl`: reads arguments, including YAML files, and prints a settings file for asyncrl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncrl.cli.migrate import trl, verl
from asyncrl.config import by_key
from asyncrl.errors import ConfigError

FRAMEWORKS = {"verl": verl.translate, "trl": trl.translate}
ENDINGS = (".yaml", ".yml", ".json")
HEAD = "# by `asyncrl migrate {}`; asyncrl local THIS-FILE.yaml --dry-run shows what it makes"


def main(framework: str, arguments: Sequence[str]) -> int:
    """Print the translation.

    Raises:
        ConfigError: an argument is neither `key=value` nor a file of settings.
    """
    print("\n".join([HEAD.format(framework), *FRAMEWORKS[framework](read(arguments)).lines()]))
    return 0


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """Read settings by dotted key; later ones win. Other words of a command (`python3 -m ...`) are ignored."""
    found: dict[str, Any] = {}
    waiting = ""
    for text in arguments:
        key, equals, value = text.partition("=")
        if equals:
            found[key.lstrip("-+")] = _value(value, text)
            waiting = ""
        elif text.endswith(ENDINGS) and not waiting:
            found |= _file(Path(text))
        elif text.startswith("--"):
            waiting = key.lstrip("-")
            found[waiting] = True
        elif waiting:
            # A second word makes a list, as argparse does for `--reward_funcs a b`.
            before = found[waiting]
            one = _value(text, text)
            found[waiting] = one if before is True else [*(before if isinstance(before, list) else [before]), one]
    if not found:
        scripts = [text for text in arguments if text.endswith(".sh")]
        read = f" {scripts[0]} is a shell script, which cannot be read: copy its arguments." if scripts else ""
        raise ConfigError(f"no settings were given.{read} Give key=value arguments, or a YAML file of them")
    return found


def _value(text: str, whole: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{whole}` cannot be read: {' '.join(str(error).split())}. Quote it for YAML") from error
    return _number(value)


def _number(value: Any) -> Any:
    """Convert texts like 1e-6, which YAML does not read as numbers."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _file(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}. Give a YAML file") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} has no settings. Give a YAML file of `key: value` lines")
    return {key: _number(value) for key, value in by_key(read, apart=True).items()}
