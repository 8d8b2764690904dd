"""Reads the small JSON files of a run folder, each one object. They may have been truncated, changed or replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """Raises OSError; ValueError if the file contains anything but a JSON object."""
    try:
        found = json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    return found
