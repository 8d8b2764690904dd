"""What the rollout pool has to say to whoever watches the run, among what Ray writes into the same log."""

from __future__ import annotations

from pathlib import Path

MARK = "pool: "
PIECE_BYTES = 1 << 16
"""Of a log at one look; what there is more comes with the next."""


def marked(message: str) -> str:
    """Each line as `PoolWords` knows it again."""
    return "\n".join(f"{MARK}{line}" for line in message.splitlines())


class PoolWords:
    """
    Args:
        log: of the pool; what an earlier start of the run wrote there is no news.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0

    def news(self) -> list[str]:
        """Lines that the pool has marked since the last call."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                piece = file.read(PIECE_BYTES)
        except OSError:  # not there yet
            return []
        # A line that is being written waits for its end, unless it fills the piece.
        whole = piece[: piece.rfind(b"\n") + 1] or (piece if len(piece) == PIECE_BYTES else b"")
        self._offset += len(whole)
        lines = whole.decode(errors="replace").split("\n")
        return [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
