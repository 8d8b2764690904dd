"""A server with a journal that can be killed and restarted at the same address."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from asyncrl.replay.serving import run_server
from asyncrl.settings.replay import JournalConfig
from tests.replay.helpers import replay_config, settings
from tests.replay.memory_disk import MemoryDisk
from tests.replay.served import Clients

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


class Life:
    """One server in a thread, on a disk that survives it."""

    def __init__(self, target: Callable[..., None], disk: MemoryDisk | None = None) -> None:
        self._target = target
        self.disk = disk or MemoryDisk()

    def start(self, **options) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._target, args=(self.disk, self.stop), kwargs=options, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Kill the server. The next one finds what is written by now; nothing that this one still writes reaches it."""
        left = self.disk.copy()
        self.end()
        self.disk = left

    def end(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive(), "the server did not stop"


class Server(Clients, Life):
    """A server that is killed and restarted at one address, each time on what the previous one left on the disk."""

    disk: SlowDisk

    def __init__(self, disk: SlowDisk | None = None, **config) -> None:
        Clients.__init__(self, replay_config(journal=JournalConfig(fsync_ms=1.0, segment_mb=1), **config))
        Life.__init__(self, self._serve, disk or SlowDisk())

    def _serve(self, disk: SlowDisk, stop: threading.Event, run_id: str = "run", fresh: bool = False) -> None:
        run_server(self.config, ADMISSION, run_id, "d", 7, stop, disk=disk, fresh=fresh)

    def end(self) -> None:
        self.disk.open.set()
        super().end()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        super().close()
        self.kill()
