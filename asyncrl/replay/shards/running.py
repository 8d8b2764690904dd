"""Assemble and run one shard: it first contacts the replay server (the planner), then opens its journal."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

from asyncrl.config import load_config
from asyncrl.errors import ConfigError, FencedError
from asyncrl.replay.journal.disk import Disk, FolderDisk
from asyncrl.replay.journal.recovery import run_of
from asyncrl.replay.journal.sync_thread import SyncThread
from asyncrl.replay.net.malloc import keep_heap
from asyncrl.replay.server.loop import ReplayServer
from asyncrl.replay.server.router import entrance
from asyncrl.replay.serving import discard, journal_settings, stopped_by_signals
from asyncrl.replay.shards.host import PlannerLink, Shard, heard
from asyncrl.replay.shards.payloads import Collected
from asyncrl.replay.shards.receipts import Seals
from asyncrl.replay.shards.store import open_store
from asyncrl.schema import Config
from asyncrl.settings.replay import ReplayConfig
from asyncrl.storage.full_disk import Patience

log = logging.getLogger(__name__)

TURN_S = 0.2
"""Seconds between two looks at `stopped` while waiting for the planner."""
PAUSE_S = 1.0
"""Seconds before the planner is asked again after it refused this shard."""


def run_shard(
    config: ReplayConfig,
    shard: int,
    run_digest: str,
    *,
    disk: Disk | None = None,
    folder: Path | None = None,
    fresh: bool = False,
    stop: threading.Event | None = None,
    patience: Patience | None = None,
) -> None:
    """Serve one shard until the planner says that the run is over, until `stop` is set, or until SIGTERM or SIGINT.

    Args:
        disk: disk of the journal, in place of `folder`.
        folder: folder of the journal.
        fresh: delete the journal of an earlier run; that of the planner's own run is kept.
        patience: how long to wait while the disk is full.

    Raises:
        ConfigError: see `entrance`. ReplayError: the planner serves another run. FencedError: the planner has another
            shard of this number. NoProgress: the planner does not answer.
        JournalError: the journal is damaged, in use, of another run or version, or its disk failed.
    """
    keep_heap()
    stopped = stopped_by_signals(stop)
    seals = Seals(config.keys, run_digest)
    with contextlib.ExitStack() as stack:
        # Bind the sockets first: a second shard at this address must not touch the journal of the first.
        way_in = stack.enter_context(entrance(replace(config, address=config.shard_address), "shard"))
        link = stack.enter_context(contextlib.closing(PlannerLink(config, shard, run_digest, seals)))
        first = meet(link, stopped, 2 * config.heartbeat_timeout_s)
        if first is None:
            return
        disk = disk or FolderDisk(folder or Path(), locked=True)
        # A restarted shard gets the settings it had, so also `fresh`; what it has acknowledged must be kept.
        if fresh and run_of(disk) not in (None, first.run_id):
            discard(disk)
        store = open_store(disk, journal_settings(config), {"run_id": first.run_id, "shard": shard})
        sync = SyncThread(store, config.journal.fsync_ms / 1000, patience, folder)
        stack.callback(sync.stop)
        served = Shard(shard, store, link, seals, config, first)
        server = ReplayServer(
            served,
            served,
            way_in,
            config,
            run_id=first.run_id,
            boot=f"{first.run_id}.{shard}",
            run_digest=run_digest,
            sync=sync,
        )
        log.info(
            "shard %d of run %s listens on %s: %d groups", shard, first.run_id, config.shard_address, len(store.held)
        )
        server.serve(stopped)


def meet(link: PlannerLink, stopped: threading.Event, patience_s: float) -> Collected | None:
    """Return the planner's first answer, or None if stopped before. The connection bounds the wait.

    Args:
        patience_s: seconds for which the planner may still consider an earlier process of this shard, at another
            address, alive.
    """
    until = time.monotonic() + patience_s
    while not stopped.is_set():
        question = link.ask([], "")
        while not wait([question], timeout=TURN_S).done:
            if stopped.is_set():
                return None
        try:
            return heard(question.result())
        except FencedError as error:
            if time.monotonic() > until:
                raise
            log.warning("%s", error)
        stopped.wait(PAUSE_S)
    return None


def shard_config(arguments: Sequence[str]) -> tuple[int, Config]:
    """Parse the number and the settings of a shard from `N key=value ...`. Raises ConfigError."""
    number, *overrides = arguments or [""]
    if "=" in number:
        number, overrides = "none", list(arguments)
    config = load_config(overrides)
    if not number.isdecimal() or not int(number) < config.replay.shards:
        raise ConfigError(
            f"a shard needs its number first, below replay.shards={config.replay.shards}; got {number!r}. Example: "
            "shard 0 replay.shards=2 replay.shard_address=tcp://127.0.0.1:5580"
        )
    if not config.replay.shard_address:
        raise ConfigError("a shard needs an address of its own. Give replay.shard_address=tcp://HOST:PORT")
    return int(number), config
