"""Finds the rollout pool's messages for the user in its log, into which Ray writes as well."""

from __future__ import annotations

from pathlib import Path

MARK = "pool: "
PIECE_BYTES = 1 << 16
"""Limit on the bytes read from the log in one call; the next call reads the rest."""


def marked(message: str) -> str:
    """Return the message with a mark on each line, by which `PoolWords` recognizes it."""
    return "\n".join(f"{MARK}{line}" for line in message.splitlines())


class PoolWords:
    """Reads the pool's marked messages.

    Args:
        log: the pool's log. Messages from an earlier start of the run are skipped.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0

    def news(self) -> list[str]:
        """Return the lines that the pool has marked since the last call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                piece = file.read(PIECE_BYTES)
        except OSError:  # the log does not exist yet
            return []
        # An unfinished line is left for the next call, unless it fills the piece.
        whole = piece[: piece.rfind(b"\n") + 1] or (piece if len(piece) == PIECE_BYTES else b"")
        self._offset += len(whole)
        lines = whole.decode(errors="replace").split("\n")
        return [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
