"""Base of commands that print the rows of an environment, one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.errors import ConfigError


def print_rows(made: Callable[[], Iterable[dict[str, Any]]]) -> int:
    """Print the rows and return the exit code; 2 with an error line if `made` raises ConfigError. What is printed while
    rows are made (by some tasks, and by some tasksets while they load) goes to stderr."""
    out = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for row in made():
                print(json.dumps(row), file=out)
    except ConfigError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    return 0
