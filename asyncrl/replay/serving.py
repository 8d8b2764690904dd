"""Assemble a replay server from its settings and run it: memory or journal, sockets, signals."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import JournalError
from asyncrl.replay.audit.ledger_file import LedgerFile, LedgerThread
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.disk import Disk, FolderDisk
from asyncrl.replay.journal.durable import open_core
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.replay.journal.recovery import unfinished_run
from asyncrl.replay.journal.sync_thread import SyncThread
from asyncrl.replay.net.clock import awake_clock
from asyncrl.replay.net.malloc import keep_heap, spare_collector
from asyncrl.replay.server.handlers import Handlers
from asyncrl.replay.server.loop import ReplayServer
from asyncrl.replay.server.router import Entrance, entrance
from asyncrl.replay.server.sessions import silence_of
from asyncrl.replay.server.survivors import learner_of
from asyncrl.settings.replay import ReplayConfig
from asyncrl.spans import lap

log = logging.getLogger(__name__)


def run_server(
    config: ReplayConfig,
    settings: AdmissionSettings,
    run_id: str,
    run_digest: str,
    seed: int,
    stop: threading.Event | None = None,
    ledger: LedgerFile | None = None,
    folder: Path | None = None,
    disk: Disk | None = None,
    fresh: bool = False,
) -> None:
    """Serve a run until it is finished and everybody has left, until `stop` is set, or until SIGTERM or SIGINT.

    Args:
        run_id: id of a new run; an existing journal keeps its own.
        ledger: file that receives every event, in a thread of its own, including those recovered from the journal.
        folder: folder of the journal, if `replay.durability` is `journal`. Without it and `disk` everything is kept in
            memory.
        disk: disk of the journal, in place of `folder`.
        fresh: delete the journal of an earlier run; that of an unfinished run is kept if its learner is still present.

    Raises:
        ConfigError: see `entrance`. LedgerError: the conservation law was violated. DiskFullError: there was no space.
        JournalError: the journal is damaged, in use or of another version, or its
        disk failed.
    """
    keep_heap()
    if threading.current_thread() is threading.main_thread():
        spare_collector()
    stopped = stopped_by_signals(stop)
    with contextlib.ExitStack() as stack:
        # Bind the sockets first: a second server at this address must not touch the journal of the first.
        way_in = stack.enter_context(entrance(config))
        if config.durability == "journal" and folder is not None:
            disk = FolderDisk(folder, locked=True)
        if fresh and disk is not None and not goes_on(disk, way_in, config, stopped):
            discard(disk)
        told = stack.enter_context(contextlib.closing(LedgerThread(ledger))) if ledger is not None else None
        run = {"run_id": run_id, "run_digest": run_digest, "boot": uuid.uuid4().hex}
        core, run, sync = stack.enter_context(opened(config, settings, run, seed, told, disk, folder))
        server = server_of(core, run | {"run_digest": run_digest}, sync, config, way_in)
        log.info("replay server of run %s listens on %s", run["run_id"], config.address)
        lap("start")
        server.serve(stopped)


def stopped_by_signals(stop: threading.Event | None) -> threading.Event:
    """Return `stop`, or a new event. If called in the main thread, SIGTERM and SIGINT set it."""
    stopped = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    return stopped


def server_of(
    core: ReplayCore, run: Mapping[str, str], sync: SyncThread | None, config: ReplayConfig, way_in: Entrance
) -> ReplayServer:
    handlers = Handlers(core)
    server = ReplayServer(
        core,
        handlers,
        way_in,
        config,
        run_id=run["run_id"],
        boot=run["boot"],
        run_digest=run["run_digest"],
        sync=sync,
    )
    handlers.beside = server.measured
    return server


@contextlib.contextmanager
def opened(
    config: ReplayConfig,
    settings: AdmissionSettings,
    run: dict[str, Any],
    seed: int,
    ledger: LedgerThread | None,
    disk: Disk | None,
    folder: Path | None,
) -> Iterator[tuple[ReplayCore, dict[str, Any], SyncThread | None]]:
    """Yield the core, recovered from the journal on `disk` if there is one, its run, and the journal's thread; None if
    the run is kept only in memory. On exit the journal is written to the end."""
    clock = awake_clock(config)
    limits = {"seed": seed, "max_bytes": config.max_bytes, "heartbeat_timeout_s": silence_of(config)}
    if disk is None:
        yield ReplayCore(settings, clock, journal=ledger, **limits), run, None
        return
    core, writer = open_core(
        disk,
        settings,
        clock,
        journal=journal_settings(config),
        run=run,
        listener=ledger,
        replayed=ledger.replayed if ledger else None,
        heartbeat_s=config.heartbeat_s,
        **limits,
    )
    if ledger is not None:
        ledger.recovered()
    sync = SyncThread(writer, config.journal.fsync_ms / 1000, folder)
    try:
        yield core, writer.run, sync
    finally:
        sync.stop()


def journal_settings(config: ReplayConfig) -> JournalSettings:
    return JournalSettings(
        retain=config.journal.retain,
        segment_bytes=config.journal.segment_mb << 20,
        window_bytes=config.journal.window_mb << 20,
    )


def goes_on(disk: Disk, way_in: Entrance, config: ReplayConfig, stopped: threading.Event) -> bool:
    """Return whether the run of the journal on `disk` still goes on: it is not finished, and its learner is present.
    Waits for the hello of that learner if there is such a journal. If stopped before it came, that is unknown, and the
    run is assumed to go on.

    Raises:
        JournalError: the journal is damaged, and a learner is present that may belong to its run.
    """
    damage, wait_s = None, config.heartbeat_timeout_s
    try:
        run_id = unfinished_run(disk)
    except JournalError as error:
        run_id, damage = "", error
    if run_id is None:
        return False
    whose = f"the journal of run {run_id}" if damage is None else f"a journal that cannot be read ({damage})"
    log.info("overwrite=true: %s is deleted unless a learner of its run is heard within %.0f s", whose, wait_s)
    peer = learner_of(run_id, way_in, wait_s, stopped, awake_clock(config))
    if peer is None:
        return stopped.is_set()
    hello, envelope = peer
    log.warning(
        "overwrite=true, but %s %r (incarnation %s) of run %s is still alive, so the journal is kept. Stop it to "
        "begin a new run, or start with resume=auto", hello.role, hello.name, envelope.incarnation, envelope.run
    )  # fmt: skip
    if damage is not None:
        raise damage
    return True


def discard(disk: Disk) -> None:
    """Delete the journal of an earlier run, as `overwrite=true` asks for."""
    for name in disk.names():
        disk.remove(name)
    disk.sync_folder()
