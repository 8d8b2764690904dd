"""Code of the user by path: functions and classes named in settings as `file.py:name` or `package.module:name`.

Importing runs it: only a process that uses it, or one that was started to find out whether it can be used, may.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError


def load_function(spec: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function, or class, named by `file.py:name` or `package.module:name`.

    Args:
        setting: which key named it, for the error.

    Raises:
        ConfigError: malformed, no such file, module or function; or importing it failed.
    """
    given = f"{setting}={spec!r}"
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{given} names no function. Write file.py:name or package.module:name")
    module = _load_file(Path(place), given) if place.endswith(".py") else _load_module(place, given)
    function = getattr(module, name, None)
    if function is None:
        defined = sorted(key for key, value in vars(module).items() if _is_of(module, value))
        raise ConfigError(f"{given}: {place} has no {name!r}. It defines: {', '.join(defined)}")
    if not callable(function):
        raise ConfigError(f"{given} is a {type(function).__name__}, not a function")
    return function


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether it is a function, or a class that the module itself defines."""
    own = inspect.isclass(value) and value.__module__ == module.__name__
    return own or inspect.isfunction(value)


def _load_file(path: Path, given: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{given}: there is no file {path} (looked from {Path.cwd()})")
    location = importlib.util.spec_from_file_location(f"user_file_{path.stem}", path)
    assert location is not None and location.loader is not None  # holds for any name that ends in .py
    module = importlib.util.module_from_spec(location)
    # Registered and with its folder importable, so that dataclasses and imports of neighbouring files work in it.
    sys.modules[location.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        location.loader.exec_module(module)
    # User code at a process boundary: whatever it raises is one refused setting, the exit of a script included.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error
