"""Reports how the roles of a finished run ended, from its `logs`.

consumes: the logs, and the exit codes that `asyncrl local` recorded for the roles that it had started
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.storage.objects import read_object
from asyncrl.utils.process_tree import describe_exit

ENDS_FILE = "ends.json"
CALLED = {"replay": "the replay server", "rollout": "the rollout pool", "learner": "torchrun, the learner"}
NUMBERED = {"rollout": "rollout worker"}

ERROR = re.compile(r"\b[A-Z]\w*Error: ")


@dataclass(frozen=True, slots=True)
class End:
    """How a role ended."""

    name: str
    how: str
    last_word: float
    """Time of the last write to its log, in seconds since the epoch."""
    error: str
    """Last error in its log if it failed; empty if it did not."""


def note_ends(log_dir: Path, codes: Mapping[str, tuple[int | None, bool]]) -> None:
    """Record for each role its exit code, and whether it was stopped by the process that started it."""
    with contextlib.suppress(OSError):  # a full disk must not fail the end of the run
        (log_dir / ENDS_FILE).write_text(json.dumps(codes))


def forget_ends(log_dir: Path) -> None:
    (log_dir / ENDS_FILE).unlink(missing_ok=True)


def ends_in(log_dir: Path) -> Iterator[End]:
    """Iterate over the ends of the roles, one per log."""
    codes: dict[str, tuple[int | None, bool]] = {}
    with contextlib.suppress(OSError, ValueError):  # the file is missing or incomplete
        codes = read_object(log_dir / ENDS_FILE)
    for path in sorted(log_dir.glob("*.log")):
        kind, _, number = path.stem.partition("-")
        if known := re.fullmatch(r"\d+", number) and NUMBERED.get(kind):
            called = f"{known} {number}"
        else:
            called = CALLED.get(path.stem, path.stem)
        code = codes.get(path.stem)
        failed = code is not None and code[0] != 0 and not code[1]
        how = _how(code, bool(known), bool(codes))
        yield End(called, how, path.stat().st_mtime, _last_error(path) if failed else "")


def _last_error(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if ERROR.search(line)), "")


def _how(code: tuple[int | None, bool] | None, below: bool, known: bool) -> str:
    match code:
        case [int() | None as number, bool() as stopped]:
            return f"ended: {describe_exit(number)}{', stopped at the end of the run' if stopped else ''}"
    return "ended with the pool" if below and known else "ended; how was not recorded"
