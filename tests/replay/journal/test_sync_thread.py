"""The thread that syncs: whatever becomes of a batch, the loop hears of it."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from asyncrl.errors import DiskFullError, JournalError
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.log import JournalSettings, Opening, SegmentLog
from asyncrl.replay.journal.sync_thread import SyncThread
from tests.replay.memory_disk import MemoryDisk

PATIENCE_S = 60


class Bytes(SegmentLog):
    """A log of plain bytes."""

    def _opening(self, end: int) -> Opening:
        return Opening([b"opening"], ())

    def append(self, data: bytes) -> None:
        self._append([data])


class FailingDisk(MemoryDisk):
    """`error` is raised by the next writes."""

    error: BaseException | None = None

    def write(self, name: str, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        if self.error is not None:
            raise self.error
        super().write(name, offset, buffers)


class Loop:
    """What the server's loop does with a journal on `disk`."""

    def __init__(self, disk: FailingDisk) -> None:
        self.disk, self.log = disk, Bytes(disk, JournalSettings(segment_bytes=1 << 16))
        self.sync = SyncThread(self.log, 0.001)

    def append(self) -> None:
        self.log.append(b"record")
        self.sync.nudge()

    def hear(self) -> None:
        """waits for: a word of the thread, 60 s."""
        assert select.select([self.sync.wakeup.fd], [], [], PATIENCE_S)[0], "the loop is not woken"
        self.sync.heard()

    def hear_until_durable(self) -> None:
        while self.log.durable < self.log.promised:
            self.hear()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(FailingDisk())
    yield made
    made.sync.stop()


def test_every_append_is_synced_and_the_loop_is_woken(loop: Loop) -> None:
    for _ in range(50):
        loop.append()
        loop.hear_until_durable()
    assert loop.disk.syncs >= 50


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "broken"), MemoryError("no memory"), ValueError("a bug")],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_is_raised_in_the_loop(loop: Loop, error: BaseException) -> None:
    loop.append()
    loop.hear_until_durable()
    loop.disk.error = error
    loop.append()
    with pytest.raises(JournalError, match="could not be written"):
        while True:
            loop.hear()
    assert loop.log.durable < loop.log.promised


def test_a_full_disk_ends_the_thread_with_the_file_and_nothing_more_is_durable(loop: Loop) -> None:
    loop.append()
    loop.hear_until_durable()
    loop.disk.error = OSError(errno.ENOSPC, "full")
    loop.append()
    with pytest.raises(DiskFullError, match=r"the disk is full: .*\.seg needs .* bytes.*resume=auto"):
        while True:
            loop.hear()
    assert loop.log.durable < loop.log.promised


def test_after_a_thread_that_failed_the_folder_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Bytes(FolderDisk(tmp_path, locked=True), JournalSettings(segment_bytes=4096))
    sync = SyncThread(log, 0.001)
    with monkeypatch.context() as patched:
        patched.setattr(log.disk, "sync", lambda name: os.fsync(-1))
        log.append(b"record")
        sync.nudge()
        sync._thread.join(PATIENCE_S)
    with pytest.raises(JournalError, match="could not be written"):
        sync.heard()
    sync.stop()
    FolderDisk(tmp_path, locked=True).close()
