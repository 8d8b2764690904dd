"""A server with a journal that can be killed and restarted at the same address."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from asyncrl.replay.client.client import LearnerClient, RolloutClient
from asyncrl.replay.serving import run_server
from asyncrl.settings.replay import JournalConfig, ReplayConfig
from tests.replay.helpers import close_all, replay_config, settings
from tests.replay.memory_disk import MemoryDisk

ADMISSION = settings(groups_per_step=2, pipeline_depth=1)


class SlowDisk(MemoryDisk):
    """A disk whose syncs wait until `open` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        """Set once something is written and waits for its sync."""
        self.written = 0
        """Number of writes."""
        self._free = -1

    def hold(self) -> None:
        """From now on hold the syncs of later writes. A sync of earlier writes passes: a test would mistake it for one
        of theirs."""
        self._free = self.written
        self.waiting.clear()
        self.open.clear()

    def write(self, name: str, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        super().write(name, offset, buffers)
        self.written += 1

    def sync(self, name: str) -> None:
        if self.written > self._free:
            if not self.open.is_set():
                self.waiting.set()
            self.open.wait(60)
        super().sync(name)

    def copy(self) -> SlowDisk:
        after = SlowDisk()
        after.__dict__.update({k: v for k, v in super().copy().__dict__.items() if k not in ("open", "waiting")})
        return after


class Server:
    """A server that is killed and restarted at one address, each time on what the previous one left on the disk."""

    def __init__(self, disk: SlowDisk | None = None, **config) -> None:
        self.config: ReplayConfig = replay_config(journal=JournalConfig(fsync_ms=1.0, segment_mb=1), **config)
        self.disk = disk or SlowDisk()
        self._clients: list = []

    def start(self, *, run_id: str = "run", fresh: bool = False) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=run_server,
            args=(self.config, ADMISSION, run_id, "d", 7, self._stop),
            kwargs={"disk": self.disk, "fresh": fresh},
            daemon=True,
        )
        self._thread.start()

    def kill(self) -> None:
        """Kill the server. The next one finds what is written by now; nothing that this one still writes reaches it."""
        left = self.disk.copy()
        self._stop.set()
        self.disk.open.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"
        self.disk = left

    def restart(self) -> None:
        self.kill()
        self.start()

    def learner(self, rank: int = 0) -> LearnerClient:
        return self._kept(LearnerClient(self.config.address, rank=rank, run_digest="d", config=self.config))

    def worker(self, name: str = "w") -> RolloutClient:
        return self._kept(RolloutClient(self.config.address, worker=name, run_digest="d", config=self.config))

    def _kept(self, client):
        self._clients.append(client)
        return client

    def close(self) -> None:
        close_all(self._clients)
        self.kill()
