"""Files that processes of a run write on, read on by who looks at it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.storage.lines import row_of

Row = Mapping[str, Any]

WORKER_LOGS = "rollout-*.log"
REWARD_WARNING = "WARNING asyncrl.rewards.pool: "
EPISODE_WARNING = "WARNING asyncrl.rollout.rewards.watch: "
FILTER_WARNING = "WARNING asyncrl.rollout.groups.filters: "
TOLD = (REWARD_WARNING, EPISODE_WARNING, FILTER_WARNING)
MAX_WARNINGS = 10


class MetricsTail:
    """New whole rows of a growing metrics file, at first of its last `most` bytes. A resume makes it shorter: what it
    kept is no news; nor is what is damaged, which the resume puts aside."""

    def __init__(self, path: Path, most: float = math.inf) -> None:
        self._path, self._most = path, most
        self._offset = 0
        self._inode = 0
        self._read: set[int] = set()
        """Of the lines that were read, their hashes."""

    def read(self) -> list[Row]:
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return []
        if state.st_ino != self._inode or state.st_size < self._offset:
            self._inode, self._offset = state.st_ino, int(max(0, state.st_size - self._most))
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = [line for line in whole.splitlines() if hash(line) not in self._read]
        self._read.update(map(hash, fresh))
        return [row for line in fresh if (row := row_of(line)) is not None and isinstance(row.get("step"), int)]


class RewardWarnings:
    """Lines of the rollout workers' logs, from now on, about failing rewards and episodes, and about filters that keep
    nothing: a run may stall on them in silence."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # A resumed run appends: what an earlier one had to say is no news.
        self._offsets = {path: path.stat().st_size for path in log_dir.glob(WORKER_LOGS)}
        self._left = MAX_WARNINGS

    def read(self) -> list[str]:
        """New ones, `MAX_WARNINGS` over the run: the logs have them all."""
        found: list[str] = []
        for path in sorted(self._log_dir.glob(WORKER_LOGS)):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            parted = (line.partition(marker)[2] for line in lines for marker in TOLD)
            found += [f"{path.stem}: {said}" for said in parted if said]
        shown, self._left = found[: self._left], max(0, self._left - len(found))
        return shown
