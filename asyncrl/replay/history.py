"""`ledger.jsonl` in the run folder: what became of every group, one JSON line per event, for eyes and for audits.

A record, not a journal: nothing is recovered from it. Payloads are not in it. `n` counts the events of the run, so that
a server that was killed goes on in the right place: what was not written is added, what the journal forgot is cut off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from asyncrl.replay import events as ev
from asyncrl.replay.disk import FULL

LEDGER_FILE = "ledger.jsonl"
TAIL_BYTES = 4 << 20
"""Read from the end of an existing file, to see how far it goes."""


class LedgerFile:
    """Call it with every event of the core. Lines reach the file when the learner restores and with each trained step.

    Nothing is made before that: until the learner is there the run folder is not prepared, and a folder with a strange
    file in it would be refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._members: dict[int, tuple[int, ...]] = {}
        """Step -> groups, from its sealing until it is trained: the event of training names no members."""
        self._count = 0
        """Events of the run so far."""
        self._written = 0
        """`n` of the last line that is in the file already."""
        self._replaying = False

    def __call__(self, event: ev.Event) -> None:
        if self._replaying:
            self._replaying = False
            self._cut_after(self._count)
            self._written = 0
        self._count += 1
        self._take(event)
        if isinstance(event, ev.Trained | ev.Restored | ev.Finished):
            self._write()

    def replayed(self, count: int, event: ev.Event) -> None:
        """The journal remembers `event` as the `count`-th of the run; called before anything new."""
        if not self._replaying:
            self._replaying, self._written = True, self._last_count()
        self._count = count
        if isinstance(event, ev.Snapshotted):
            self._members = {row[0]: tuple(row[1]) for row in event.image["untrained"]}
        self._take(event)

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            self._members[event.step] = event.members
        line = self._line(event)
        if line is not None and self._count > self._written:
            self._lines.append(json.dumps(line | {"n": self._count}) + "\n")

    def _last_count(self) -> int:
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
        counts = (count_of(line) for line in reversed(lines))
        return next((count for count in counts if count is not None), 0)

    def _cut_after(self, count: int) -> None:
        """Remove half a line, and lines of events that were never durable: they did not happen."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = len(lines)
        while kept and ((last := count_of(lines[kept - 1])) is None or last > count):
            kept -= 1
        if kept < len(lines):
            # In place: written anew on a full disk, the file would be lost.
            os.truncate(self._path, sum(map(len, lines[:kept])))

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(self._lines).encode()
        before = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab", buffering=0) as file:
                whole = file.write(content) == len(content)
        except OSError as error:
            if error.errno not in FULL:
                raise
            whole = False
        if whole:
            self._lines.clear()
        else:  # The disk is full: the journal says so aloud, and these lines come with the next that fit.
            if self._path.exists():
                os.truncate(self._path, before)

    def _line(self, event: ev.Event) -> dict[str, Any] | None:
        match event:
            case ev.Published(policy_version=version, parent=parent):
                return {"event": "published", "policy_version": version, "parent": parent}
            case ev.Issued():
                issued = {"event": "issued", "group": event.group_id, "prompt": event.prompt_index}
                return issued | {"attempt": event.attempt, "worker": event.worker}
            case ev.Returned(group_id=group):
                return {"event": "returned", "group": group}
            case ev.Inserted(header=header):
                return {"event": "inserted", "group": header.group_id, "worker": header.worker}
            case ev.Dropped(group_id=group, reason=reason, detail=detail):
                dropped = {"event": "dropped", "group": group, "reason": reason.value}
                return dropped | ({"detail": detail} if detail else {})
            case ev.Sealed(step=step, members=members):
                return {"event": "leased", "step": step, "groups": members}
            case ev.Trained(step=step, policy_version=version):
                groups = self._members.pop(step, ())  # a restore seals the step again before it is trained again
                return {"event": "trained", "step": step, "policy_version": version, "groups": groups}
            case ev.Committed(step=step):
                return {"event": "committed", "step": step}
            case ev.Restored(step=step):
                return {"event": "restore", "next_step": step + 1}
            case ev.Finished():
                return {"event": "finished"}
            case _:
                return None


def count_of(line: bytes) -> int | None:
    """`n` of a line; None for what is no whole line: the file is never synced, so a power loss can leave anything."""
    try:
        return int(json.loads(line).get("n", 0)) if line.endswith(b"\n") else None
    except (ValueError, AttributeError, TypeError):
        return None
