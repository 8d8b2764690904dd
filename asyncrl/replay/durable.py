"""A replay core with a memory that outlives its process: recovery at the start, every event journalled after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.replay import events as ev
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.core import ReplayCore
from asyncrl.replay.disk import Disk
from asyncrl.replay.journal import Journal, JournalSettings
from asyncrl.replay.ledger import Entry
from asyncrl.replay.recovery import decode_record, segment_chain
from asyncrl.replay.segments import REPAIR, offset_of, position_of, read_at, scan, segment_name, segment_of
from asyncrl.replay.state import ReplayState

log = logging.getLogger(__name__)

RESUME_S = 600.0
"""A learner loads its model before it goes on with a finished run."""
_ELSEWHERE = object()
"""Payload of a group that lies in an older segment, until it is known whether it is still needed."""

Listener = Callable[[ev.Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal remembers."""

    run: dict[str, Any]
    state: ReplayState
    end: int
    """Journal position after the last record that counts."""
    places: dict[int, int]
    """Group id -> position of the record with its payload."""


def recover(
    disk: Disk, max_staleness: int, replayed: Callable[[int, ev.Event], None] | None = None
) -> Recovered | None:
    """The state after the last record that was finished; None when nothing was ever durable.

    What follows that record is the unfinished tail of a crash: nobody was told of it, and it is dropped.

    Args:
        replayed: told every event from the newest snapshot on, with its number in the run.

    Raises:
        JournalError: the journal is damaged; the message names file and byte.
    """
    chain = segment_chain(disk)
    if not chain:
        return None
    newest = chain[-1]
    state = ReplayState(max_staleness)
    places = dict(zip(newest.snapshot.places[::2], newest.snapshot.places[1::2], strict=True))
    end = position_of(newest.number, 0)
    for record in scan(disk, newest.number):
        end = record.end
        event = decode_record(record) if record.body else None
        if event is not None:
            state.apply(event)
            if replayed is not None:
                replayed(state.applied, event)
        if isinstance(event, ev.Snapshotted):
            for group in places:
                state.ledger.entries[group].payload = _ELSEWHERE
        elif isinstance(event, ev.Inserted):
            places[event.header.group_id] = record.position
    disk.sync(segment_name(newest.number))  # Found does not mean durable: a killed process leaves it in the page cache.
    stored = {group: entry for group, entry in state.ledger.entries.items() if entry.payload is not None}
    for group, entry in stored.items():
        if entry.payload is _ELSEWHERE:
            _attach(disk, entry, places[group])
    return Recovered(run=newest.snapshot.run, state=state, end=end, places={group: places[group] for group in stored})


def _attach(disk: Disk, entry: Entry, position: int) -> None:
    record = read_at(disk, position)
    event = None if record is None else decode_record(record)
    if not isinstance(event, ev.Inserted) or event.header.group_id != entry.group_id:
        raise JournalError(
            f"the journal file {segment_name(segment_of(position))} is damaged at byte {offset_of(position)}: the "
            f"payload of group {entry.group_id} is not there. {REPAIR}"
        )
    entry.payload = event.payload


def open_core(
    disk: Disk,
    settings: AdmissionSettings,
    clock: Callable[[], float],
    *,
    journal: JournalSettings,
    run: dict[str, Any],
    seed: int = 0,
    max_bytes: int = 1 << 30,
    heartbeat_s: float = 1.0,
    heartbeat_timeout_s: float = 10.0,
    listener: Listener | None = None,
    replayed: Callable[[int, ev.Event], None] | None = None,
) -> tuple[ReplayCore, Journal]:
    """The core as the journal on `disk` left it, and the journal it goes on writing.

    Args:
        run: `run_id`, `run_digest` and `boot` of a new journal; one that is there already keeps its own `run_id` and
            `boot`, which is how peers recognise the server.
        listener: told every event after it was journalled and before it is applied; nothing of what is recovered.
        replayed: see `recover`.

    Raises:
        JournalError: the journal is damaged or of another version.
    """
    started = time.perf_counter()
    found = recover(disk, settings.max_staleness, replayed)
    state = found.state if found else ReplayState(settings.max_staleness)
    identity = {**run, "settings": _plain(settings)}
    if found:
        identity |= {name: found.run[name] for name in ("run_id", "boot")}
        _tell(found, run, time.perf_counter() - started)
    places, end = (found.places, found.end) if found else ({}, -1)
    writer = Journal(disk, journal, identity, state, previous_end=end, places=places)
    core = ReplayCore(
        settings,
        clock,
        seed=seed,
        max_bytes=max_bytes,
        heartbeat_timeout_s=heartbeat_timeout_s,
        journal=_recorder(writer, listener),
        state=state,
    )
    core.take_over(settle_s=2 * heartbeat_s if found else 0.0, resume_s=RESUME_S)
    return core, writer


def _tell(found: Recovered, run: dict[str, Any], seconds: float) -> None:
    log.info("recovered run %s in %.2f s: %d bytes of groups", found.run["run_id"], seconds, found.state.buffer.nbytes)
    if found.run["run_digest"] != run["run_digest"]:
        log.warning("the journal was written with other settings (digest %s)", found.run["run_digest"])


def _recorder(writer: Journal, listener: Listener | None) -> Listener:
    def record(event: ev.Event) -> None:
        writer.append(event)
        if listener is not None:
            listener(event)

    return record


def _plain(settings: AdmissionSettings) -> dict[str, Any]:
    return {**asdict(settings), "stale_policy": settings.stale_policy.value}
