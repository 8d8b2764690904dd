"""Modules whose packages are an extra, and whose import takes seconds: loaded when an environment asks for them."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError


def late_import(module: str, needs: str, extra: str) -> Any:
    """`asyncrl.environments.<module>`, imported now.

    Args:
        needs: who needs what, for the error.
    """
    try:
        return importlib.import_module(f"asyncrl.environments.{module}")
    except ImportError as error:
        raise ConfigError(f"{needs}: pip install 'asyncrl[{extra}]' ({error})") from error
