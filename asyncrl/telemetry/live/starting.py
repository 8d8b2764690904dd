"""Which processes of a run are up and which are waited for, read from their logs while they start.

consumes: new lines of `logs/*.log` · waits for: nothing; `news` is called by whoever supervises
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Sign:
    """What a log says once its process is ready, and what the process does until then."""

    text: str
    before: str
    after: str


LISTENS = _Sign(" listens on ", "reading its journal", "listens")
SIGNS = {
    "replay": LISTENS,
    "learner": _Sign(" ranks on ", "loading the model", "has its model"),
    "rollout": _Sign("the engine is ready", "loading the engine", "has its engine"),
}
"""By the name of the role. The last is said by workers, in logs of their own (`rollout-0.log`)."""


class StartWatch:
    """Of the roles of one run; `roles` without a sign (shards) are not waited for."""

    def __init__(self, log_dir: Path, roles: Sequence[str]) -> None:
        self._log_dir = log_dir
        self._waiting = {role: SIGNS[role] for role in roles if role in SIGNS}
        # A resumed run appends: what an earlier one had to say is no news.
        self._offsets = {path: path.stat().st_size for path in log_dir.glob("*.log")}
        self._began = time.monotonic()

    def state(self) -> str:
        """Whom the start waits for."""
        open_ = [f"{role} ({sign.before})" for role, sign in self._waiting.items()]
        return f"starting, waiting for {', '.join(open_)}" if open_ else "starting, waiting for the first step"

    def news(self) -> list[str]:
        """Who became ready since the last call, and after how long."""
        ready = [role for role, sign in self._waiting.items() if self._says(role, sign.text.encode())]
        seconds = time.monotonic() - self._began
        return [f"{role} {self._waiting.pop(role).after} ({seconds:.0f} s)" for role in ready]

    def _says(self, role: str, text: bytes) -> bool:
        for path in self._log_dir.glob(f"{role}*.log"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                if text in file.read():  # whole: a start is a few lines
                    return True
        return False
