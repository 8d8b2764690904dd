"""Determines the origin of each setting of a run, for the comments in its `config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import yaml

from asyncrl.config import choice_files, chosen_by_default, config_groups, config_keys
from asyncrl.plain_text import plain
from asyncrl.schema import Config

DEFAULT = "default"
TYPED = "command line"


class FromFile(str):
    """An argument `key=value` from a settings file of the user."""

    __slots__ = ("file",)
    file: str

    @classmethod
    def of(cls, argument: str, file: str) -> FromFile:
        made = cls(argument)
        made.file = " ".join(plain(file).split())  # one line, because it is written into a comment
        return made


def origins(overrides: Sequence[str], preset: str | None, kind: type = Config) -> dict[str, str]:
    """Return dotted key -> origin of its value: the command line, a settings file, a file of `configs/`, the preset of
    the loss, or `default`.

    Args:
        overrides: as passed to `load_config`.
        preset: the loss that they selected; None for a schema without losses and other groups.
        kind: the schema.
    """
    if preset is None:
        found = dict.fromkeys(config_keys(kind), DEFAULT)
        return found | {text.partition("=")[0]: _origin_of(text) for text in overrides}
    groups = config_groups()
    typed = {key: text for text in overrides for key in [text.partition("=")[0].lstrip("+")]}
    chosen = {key: text.partition("=")[2] for key, text in typed.items() if key in groups}
    experiment = chosen.pop("experiment", "null")
    files = list(choice_files("experiment", experiment)) if experiment != "null" else []
    inside = dict(label.split("=", 1) for label, _ in files if not label.startswith("experiment="))
    # An experiment's own values override those of the groups, even of groups chosen on the command line.
    files = [each for each in files if each[0].startswith("experiment=")]
    of_groups = [each for pair in (chosen_by_default() | inside | chosen).items() for each in choice_files(*pair)]
    found = {key: f"preset {preset}" if key.startswith("loss.") else DEFAULT for key in config_keys()}
    for label, values in [*of_groups, *files]:
        found |= dict.fromkeys(values, f"configs/{label.replace('=', '/')}.yaml")
    for key, text in typed.items():
        if key not in groups:
            found[key] = _origin_of(text)
    return found


def _origin_of(text: str) -> str:
    return text.file if isinstance(text, FromFile) else TYPED


def commented(text: str, sources: Mapping[str, str]) -> str:
    """Return YAML with a comment that names the source of each value; a key without one gets its parent's."""
    lines = text.splitlines()
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, line in _ends(document, ()) if isinstance(document, yaml.MappingNode) else ():
        known = [sources[prefix] for prefix in accumulate(key, "{}.{}".format) if prefix in sources]
        if known:
            lines[line] += f"  # {known[-1]}"
    return "".join(f"{line}\n" for line in lines)


def _ends(mapping: yaml.MappingNode, above: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    """Return for each value its key, and the line to which a comment may be appended."""
    found: list[tuple[tuple[str, ...], int]] = []
    for name, value in mapping.value:
        key = (*above, str(name.value))
        if isinstance(value, yaml.MappingNode) and value.value:
            found += _ends(value, key)
        else:
            found.append((key, name.end_mark.line if _begins_below(value) else value.end_mark.line))
    return found


def _begins_below(value: Any) -> bool:
    """Return whether a value begins on the next line, as a block list or a text after `|` does. The end mark of such a
    value is the beginning of whatever follows it."""
    listed = isinstance(value, yaml.SequenceNode) and not value.flow_style
    return listed or (isinstance(value, yaml.ScalarNode) and value.style in ("|", ">"))
