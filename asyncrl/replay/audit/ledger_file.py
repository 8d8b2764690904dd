"""`ledger.jsonl` in the run folder: what became of every group, one JSON line per event, for eyes and for audits.

A record, not a journal: nothing is recovered from it. Payloads are not in it. `n` counts the events of the run, so that
a server that was killed goes on in the right place: what was not written is added, what the journal forgot is cut off.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.replay.core.durable import events as ev
from asyncrl.storage.lines import ChainedLineFile

log = logging.getLogger(__name__)

LEDGER_FILE = "ledger.jsonl"
BLOCK = 1 << 20
"""Bytes read at once from the end of an existing file, to see how far it goes: all of it may not fit in memory."""
LAST_WRITES_S = 60.0
"""Seconds for what is left at the end: it is no journal, nothing is recovered from it."""


class LedgerFile:
    """Call it with every event of the core. Lines reach the file when the learner restores and with each trained step.

    Nothing is made before that: until the learner is there the run folder is not prepared, and a folder with a strange
    file in it would be refused.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: ChainedLineFile | None = None
        """None until the first line is written."""
        self._rows: list[dict[str, Any]] = []
        self._members: dict[int, tuple[int, ...]] = {}
        """Step -> groups, from its sealing until it is committed: the event of training names no members, and after a
        restart the step is trained again without being sealed again."""
        self._count = 0
        """Events of the run so far."""
        self._written = 0
        """`n` of the last line that is in the file already."""
        self._replaying = False

    def __call__(self, event: ev.Event) -> None:
        self.recovered()
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
            rows = (*event.image["trained"], *event.image["untrained"])
            self._members = {row[0]: tuple(row[1]) for row in rows}
        self._take(event)

    def recovered(self) -> None:
        """The journal has told all that it remembers. What a file lacks of it is written now: a start that fails before
        the learner is there leaves a journal that begins after it."""
        if self._replaying:
            self._replaying = False
            self._cut_after(self._count)
            self._written = 0
            if self._rows and self._path.exists():
                self._write()

    def _take(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            self._members[event.step] = event.members
        elif isinstance(event, ev.Committed):
            self._members = {step: groups for step, groups in self._members.items() if step > event.step}
        line = self._line(event)
        if line is not None and self._count > self._written:
            self._rows.append(line | {"n": self._count})

    def _last_count(self) -> int:
        if not self._path.exists():
            return 0
        counts = (count_of(line) for _, line in lines_from_the_end(self._path))
        return next((count for count in counts if count is not None), 0)

    def _cut_after(self, count: int) -> None:
        """Remove half a line, and lines of events that were never durable: they did not happen."""
        if not self._path.exists():
            return
        known = ((end, count_of(line)) for end, line in lines_from_the_end(self._path))
        kept = next((end for end, number in known if number is not None and number <= count), 0)
        if kept < self._path.stat().st_size:
            # In place: written anew on a full disk, the file would be lost.
            os.truncate(self._path, kept)

    def _write(self) -> None:
        """Raises DiskFullError, OSError."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = ChainedLineFile(self._path)
        self._file.append(self._rows)
        self._rows.clear()

    def _line(self, event: ev.Event) -> dict[str, Any] | None:
        match event:
            case ev.Published(policy_version=version, parent=parent):
                return {"event": "published", "policy_version": version, "parent": parent}
            case ev.Begun():
                begun = {"event": "begun", "group": event.first, "prompt": event.prompt_index}
                return begun | {"members": event.members}
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
                groups = self._members.get(step, ())
                return {"event": "trained", "step": step, "policy_version": version, "groups": groups}
            case ev.Retired(group_id=group):
                return {"event": "retired", "group": group}
            case ev.Committed(step=step):
                return {"event": "committed", "step": step}
            case ev.Restored(step=step, again=again):
                return {"event": "restore", "next_step": step + 1, "again": again}
            case ev.Configured(settings=settings):
                return {"event": "settings", "settings": settings}
            case ev.Finished():
                return {"event": "finished"}
            case _:
                return None


class LedgerThread:
    """The thread that writes the file, so that the server's loop never waits for its disk. Call it with every event of
    the core. `replayed` and `recovered` are for the recovery, before the first one.

    consumes:     events, in order
    waits for:    the next of them, without a deadline: it lives as long as the server
    unblocked by: it, `close`
    """

    def __init__(self, ledger: LedgerFile) -> None:
        self.replayed, self.recovered = ledger.replayed, ledger.recovered
        self._ledger = ledger
        self._events: queue.SimpleQueue[ev.Event | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._main, name="ledger", daemon=True)
        self._thread.start()

    def __call__(self, event: ev.Event) -> None:
        """Raises what ended the thread: the server of a run whose ledger cannot be written must not go on silently."""
        if self._failure is not None:
            raise self._failure
        # The payload is none of its business, and would stay in memory for as long as the disk is slow.
        self._events.put(replace(event, payload=None) if isinstance(event, ev.Inserted) else event)

    def close(self) -> None:
        """Write what is left. Raises what ended the thread."""
        self._events.put(None)
        self._thread.join(LAST_WRITES_S)
        if self._thread.is_alive():
            log.error(
                "the last lines of the ledger could not be written to its disk within %.0f s: they are missing",
                LAST_WRITES_S,
            )
        elif self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._ledger(event)
            # The boundary of the thread: what ends it must reach the loop, or lines would be missing without a word.
            except Exception as error:
                log.exception("the ledger could not be written")
                self._failure = error
                return


def lines_from_the_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte at which it ends, line) of each line of a file, the last one first; only a block of it is in memory."""
    with path.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        rest = b""
        while start > 0:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            lines = (file.read(size) + rest).split(b"\n")
            # What ends with the first line break may begin in the block before.
            rest = lines[0] if len(lines) == 1 else lines[0] + b"\n"
            whole = [line + b"\n" for line in lines[1:-1]] + ([lines[-1]] if len(lines) > 1 and lines[-1] else [])
            for line in reversed(whole):
                yield end, line
                end -= len(line)
        if rest:
            yield end, rest


def count_of(line: bytes) -> int | None:
    """`n` of a line; None for what is no whole line: the file is never synced, so a power loss can leave anything."""
    try:
        return int(json.loads(line).get("n", 0)) if line.endswith(b"\n") else None
    except (ValueError, AttributeError, TypeError):
        return None
