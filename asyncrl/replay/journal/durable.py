"""A replay core with a memory that outlives its process: recovery at the start, every event journalled after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.buffer import IN_JOURNAL
from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.replay.core.durable.state import ReplayState
from asyncrl.replay.journal.disk import Disk
from asyncrl.replay.journal.log import Journal, JournalSettings
from asyncrl.replay.journal.recovery import decode_record, read_event, segment_chain
from asyncrl.replay.journal.segments import damaged, left_out, offset_of, position_of, scan, segment_name, segment_of

log = logging.getLogger(__name__)

RESUME_S = 600.0
"""A learner loads its model before it goes on with a finished run."""
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
    disk: Disk, replayed: Callable[[int, ev.Event], None] | None = None, max_bytes: int = 1 << 30
) -> Recovered | None:
    """The state after the last record that was finished; None when nothing was ever durable.

    What follows that record is the unfinished tail of a crash: nobody was told of it, and it is dropped.

    Args:
        replayed: told every event from the newest snapshot on, with its number in the run.
        max_bytes: of payloads in memory; the others are looked at, and stay in the journal until they are needed.

    Raises:
        JournalError: the journal is damaged; the message names file and byte.
    """
    chain = segment_chain(disk)
    if not chain:
        return None
    newest = chain[-1]
    state = ReplayState()
    places = dict(zip(newest.snapshot.places[::2], newest.snapshot.places[1::2], strict=True))
    end, run = position_of(newest.number, 0), newest.snapshot.run
    for record in scan(disk, newest.number):
        end = record.end
        event = decode_record(record)
        if event is not None:
            state.apply(event)
            if replayed is not None:
                replayed(state.applied, event)
        if isinstance(event, ev.Snapshotted):
            for group in places:
                state.ledger.entries[group].payload = IN_JOURNAL
        elif isinstance(event, ev.Configured):
            run = {**run, "settings": event.settings}
        elif isinstance(event, ev.Inserted):
            places[event.header.group_id] = record.position
    if left_out(disk, end):
        log.warning(
            "the journal file %s ends at byte %d with an incomplete record, which is left out. A crash leaves one "
            "that was never acknowledged; damage to the last bytes before it looks the same",
            segment_name(newest.number),
            offset_of(end),
        )
    stored = {group: entry for group, entry in state.ledger.entries.items() if entry.payload is not None}
    _attach(disk, state, places, max_bytes)
    return Recovered(run=run, state=state, end=end, places={group: places[group] for group in stored})


def _attach(disk: Disk, state: ReplayState, places: dict[int, int], max_bytes: int) -> None:
    """Every payload is read, so that damage is found now; what is trained next is kept first."""
    buffer, total = state.buffer, 0
    planned = [entry for step in sorted(buffer.untrained) for entry in buffer.untrained[step].members]
    for entry in dict.fromkeys((*planned, *buffer.waiting.values(), *state.ledger.entries.values())):
        if entry.payload is None or entry.header is None:
            continue
        payload = read_payload(disk, entry, places[entry.group_id]) if entry.payload is IN_JOURNAL else entry.payload
        fits = total + entry.header.nbytes <= max_bytes
        total += entry.header.nbytes if fits else 0
        entry.payload = payload if fits else IN_JOURNAL
    buffer.nbytes = total


def read_payload(disk: Disk, entry: Entry, position: int) -> Any:
    """Raises JournalError where `position` has not the payload of `entry`."""
    event = read_event(disk, position)
    if not isinstance(event, ev.Inserted) or event.header.group_id != entry.group_id:
        raise damaged(position, f"the payload of group {entry.group_id} is missing")
    return event.payload


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
    found = recover(disk, replayed, max_bytes)
    state = found.state if found else ReplayState()
    if found:
        # Found does not mean durable: a killed process leaves it in the page cache.
        disk.sync(segment_name(segment_of(found.end)))
    identity = {**run, "settings": settings.plain()}
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
    core.space.stored = lambda entry: read_payload(disk, entry, writer.places[entry.group_id])
    if found and found.run["settings"] != identity["settings"]:
        core.configure(identity["settings"])
    core.take_over(settle_s=2 * heartbeat_s if found else 0.0, resume_s=RESUME_S)
    return core, writer


def _tell(found: Recovered, run: dict[str, Any], seconds: float) -> None:
    log.info("recovered run %s in %.2f s: %d bytes of groups", found.run["run_id"], seconds, found.state.buffer.nbytes)
    if found.run["run_digest"] != run["run_digest"]:
        log.warning("the journal was written with other settings (digest %s)", found.run["run_digest"])


def _recorder(writer: Journal, listener: Listener | None) -> Listener:
    def record(event: ev.Event) -> None:
        writer.append(event)
        if isinstance(event, ev.Configured):
            writer.run = {**writer.run, "settings": event.settings}  # what the head of the next segment says
        if listener is not None:
            listener(event)

    return record
