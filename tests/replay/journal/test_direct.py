"""Writes past the page cache put the same bytes in the same places as ordinary ones."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path

import pytest

from asyncrl.replay.journal import direct
from asyncrl.replay.journal.direct import BLOCK, STAGE, DirectWriter

SIZES = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, STAGE, STAGE + BLOCK + 1)
OLD = b"\xaa" * (1 << 20)
"""What an earlier use of a file left in it."""


class Log:
    """A file written as a journal writes its segments: at the end, at times the last few bytes once more."""

    def __init__(self, path: Path, writer: DirectWriter) -> None:
        path.write_bytes(OLD)
        self.path, self.writer = path, writer
        self.descriptor = os.open(path, os.O_RDWR)
        self.content = b""

    def append(self, data: bytes, pieces: int, again: int = 0) -> None:
        """`again`: bytes before the end that are written again with it."""
        offset = len(self.content) - again
        self.content += data
        whole = self.content[offset:]
        cuts = [len(whole) * place // pieces for place in range(pieces + 1)]
        parts = [memoryview(whole)[a:b] for a, b in itertools.pairwise(cuts) if a < b]
        self.writer.write(self.path.name, self.descriptor, offset, parts)

    def check(self) -> None:
        """All that was written is there, and beyond the last block nothing else was touched."""
        found, end = self.path.read_bytes(), -(-len(self.content) // BLOCK) * BLOCK
        assert found[: len(self.content)] == self.content
        assert found[end : len(OLD)] == OLD[end:]


def fill(tmp_path: Path, writer: DirectWriter, seed: int) -> None:
    """Two logs in turns, as at the end of a segment, checked after every write."""
    rng = random.Random(seed)
    logs = [Log(tmp_path / name, writer) for name in ("a", "b")]
    for _ in range(12):
        log = rng.choice(logs)
        again = rng.choice((0, 0, 40, min(len(log.content), BLOCK)))
        log.append(rng.randbytes(rng.choice(SIZES)), rng.randint(1, 600), min(again, len(log.content)))
        log.check()
    for log in logs:
        os.close(log.descriptor)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_written_before_stands_and_nothing_beyond_the_last_block_changes(seed, tmp_path: Path) -> None:
    fill(tmp_path, DirectWriter(), seed)


def test_what_an_earlier_writer_left_in_the_first_block_stands(tmp_path: Path) -> None:
    log = Log(tmp_path / "a", DirectWriter())
    log.append(b"first", 1)
    log.writer = DirectWriter()
    log.append(b"second", 1)
    log.check()
    os.close(log.descriptor)


def test_a_file_system_that_refuses_is_asked_once_and_served_the_ordinary_way(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        asked.append(offset)
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(direct.os, "pwrite", refuse)
    writer = DirectWriter()
    fill(tmp_path, writer, 1)
    assert len(asked) <= 1 and not writer.works


def test_a_write_that_was_cut_short_is_finished(tmp_path: Path, monkeypatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(direct.os, "pwrite", lambda fd, data, offset: real(fd, data[:BLOCK], offset))
    fill(tmp_path, DirectWriter(), 2)


def test_a_full_disk_is_reported_and_what_is_tried_again_later_is_whole(tmp_path: Path, monkeypatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    log = Log(tmp_path / "a", DirectWriter())
    log.append(b"before", 1)
    with monkeypatch.context() as patched:
        patched.setattr(direct.os, "pwrite", full)
        if not log.writer.works:
            pytest.skip("this system has no direct writes")
        with pytest.raises(OSError, match="full"):
            log.append(bytes(range(256)) * 300, 3)
    log.append(b"", 3, again=256 * 300)
    log.check()
    os.pwrite(log.descriptor, b"abc", 3)  # Not aligned: refused if the file were still open for such.
    os.close(log.descriptor)
