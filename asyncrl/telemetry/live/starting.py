"""Determines which processes of a starting run are ready and which are still waited for, from their logs.

consumes: new lines of `logs/*.log` · waits for: nothing; the supervisor calls `news`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.telemetry.live.tails import LogLines


@dataclass(frozen=True, slots=True)
class _Sign:
    """The text that appears in a log once its process is ready, and descriptions of the process before and after."""

    text: str
    before: str
    after: str


LISTENS = _Sign(" listens on ", "reading its journal", "listens")
SIGNS = {
    "replay": LISTENS,
    "learner": _Sign(" ranks on ", "loading the model", "has its model"),
    "rollout": _Sign("the engine is ready", "loading the engine", "has its engine"),
}
"""Signs by role. The last one is written by workers, into their own logs (`rollout-0.log`)."""


class StartWatch:
    """Watches the start of one run's roles; `roles` without a sign are not waited for."""

    def __init__(self, log_dir: Path, roles: Sequence[str]) -> None:
        self._waiting = {role: SIGNS[role] for role in roles if role in SIGNS}
        self._lines = LogLines(log_dir)
        self._began = time.monotonic()

    def state(self) -> str:
        """Describe which roles the start waits for."""
        open_ = [f"{role} ({sign.before})" for role, sign in self._waiting.items()]
        return f"starting, waiting for {', '.join(open_)}" if open_ else "starting, waiting for the first step"

    def news(self) -> list[str]:
        """Return a line for each role that became ready since the last call, with the time it took."""
        ready = [
            role
            for role, sign in self._waiting.items()
            if any(sign.text in line for _, line in self._lines.new(f"{role}*.log"))
        ]
        seconds = time.monotonic() - self._began
        return [f"{role} {self._waiting.pop(role).after} ({seconds:.0f} s)" for role in ready]
