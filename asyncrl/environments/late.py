"""Loads modules of optional packages, whose import takes seconds, when an environment needs them."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError


def late_import(module: str, needs: str, extra: str) -> Any:
    """Import `asyncrl.environments.<module>` now.

    Args:
        needs: which setting needs which package, for the error.
    """
    try:
        return importlib.import_module(f"asyncrl.environments.{module}")
    except ImportError as error:
        raise ConfigError(f"{needs}: pip install 'asyncrl[{extra}]' ({error})") from error
