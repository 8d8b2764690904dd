"""Readers that follow files to which processes of a run append."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.storage.lines import row_of

Row = Mapping[str, Any]

POOL_LOG, WORKER_LOGS = "rollout.log", "rollout-*.log"
PIECE_BYTES = 1 << 16
MARK = "pool: "
REWARD_WARNING = "WARNING asyncrl.rewards.pool: "
EPISODE_WARNING = "WARNING asyncrl.rollout.rewards.watch: "
OUTCOME_WARNING = "WARNING asyncrl.rollout.groups.outcomes: "
TOLD = (REWARD_WARNING, EPISODE_WARNING, OUTCOME_WARNING)
MAX_WARNINGS = 10
SAVING = "the run ends here, and the learner saves step"
"""Begins the line of the learner's log that says so."""


class MetricsTail:
    """Reads new complete rows of a growing metrics file, at first from its last `most` bytes. After a resume has
    shortened the file, rows that were kept are not returned again; damaged rows, which the resume removes, never."""

    def __init__(self, path: Path, most: float = math.inf) -> None:
        self._path, self._most = path, most
        self._offset = 0
        self._inode = 0
        self._read: set[int] = set()
        """Hashes of the lines that were read."""

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


class LogLines:
    """Lines that processes append to the logs of a folder from now on: a resumed run appends to those of earlier
    starts."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._offsets = {path: path.stat().st_size for path in log_dir.glob("*.log")}

    def new(self, logs: str) -> Iterator[tuple[str, str]]:
        """Iterate over the name of the log and each line that is complete since the last call, see `lines_after`.

        Args:
            logs: pattern of the names of the files.
        """
        for path in sorted(self._log_dir.glob(logs)):
            lines, self._offsets[path] = lines_after(path, self._offsets.get(path, 0))
            for line in lines:
                yield path.stem, line


def lines_after(path: Path, offset: int) -> tuple[list[str], int]:
    """Return the complete lines of a file from `offset` on, at most `PIECE_BYTES`, and where they end. An unfinished
    line is left for the next call, unless it fills the piece. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        piece = file.read(PIECE_BYTES)
    whole = piece[: piece.rfind(b"\n") + 1] or (piece if len(piece) == PIECE_BYTES else b"")
    return whole.decode(errors="replace").split("\n"), offset + len(whole)


class RewardWarnings:
    """Reads warnings that rollout workers log from now on about failing rewards and episodes, and about groups that
    are all dropped: without them a run may stall silently."""

    def __init__(self, log_dir: Path) -> None:
        self._lines = LogLines(log_dir)
        self._left = MAX_WARNINGS

    def read(self) -> list[str]:
        """Return new warnings, at most `MAX_WARNINGS` over the run; the logs have all of them."""
        parted = ((log, line.partition(marker)[2]) for log, line in self._lines.new(WORKER_LOGS) for marker in TOLD)
        found = [f"{log}: {said}" for log, said in parted if said]
        shown, self._left = found[: self._left], max(0, self._left - len(found))
        return shown


def marked(message: str) -> str:
    """Return the message with a mark on each line, by which `PoolWords` recognizes it."""
    return "\n".join(f"{MARK}{line}" for line in message.splitlines())


class PoolWords:
    """Reads the rollout pool's messages for the user from its log, into which Ray writes as well."""

    def __init__(self, log_dir: Path) -> None:
        self._lines = LogLines(log_dir)

    def news(self) -> list[str]:
        """Return the lines that the pool has marked since the last call."""
        return [line.removeprefix(MARK) for _, line in self._lines.new(POOL_LOG) if line.startswith(MARK)]
