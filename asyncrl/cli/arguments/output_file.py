"""Checks the path of a command's output file before the command starts its work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError


def refuse_no_place(option: str, path: Path, kinds: Sequence[str] = ()) -> None:
    """Raises ConfigError if `path` is a folder, its folder does not exist, or its suffix is not in `kinds`."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Give the name of a file, such as {path / 'NAME'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Create it, or give another place")
    if kinds and path.suffix.lower() not in kinds:
        raise ConfigError(f"{option} {path}: its name must end in one of {', '.join(kinds)}")
