"""Writes past the page cache put the same bytes in the same places as ordinary ones."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from asyncrl.replay import direct
from asyncrl.replay.direct import BLOCK, STAGE, WORTH, DirectWriter

SIZES = (0, 1, 7, BLOCK - 1, BLOCK, WORTH - 1, WORTH, WORTH + BLOCK + 3, STAGE, STAGE + BLOCK + 1)


def written(path: Path, writer: DirectWriter, seed: int) -> tuple[bytes, bytes]:
    """`(file, what it must hold)` after writes of odd sizes at odd places, over each other."""
    rng = random.Random(seed)
    expected = bytearray(b"\xaa" * (3 * STAGE))
    path.write_bytes(expected)
    descriptor = os.open(path, os.O_RDWR)
    for _ in range(12):
        pieces = [rng.randbytes(rng.choice(SIZES)) for _ in range(rng.randint(1, 4))]
        whole = b"".join(pieces)[: 2 * STAGE]
        offset = rng.choice((0, BLOCK, BLOCK - 8, rng.randrange(STAGE)))
        cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(3))
        parts = [memoryview(whole)[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
        writer.write(descriptor, offset, parts)
        expected[offset : offset + len(whole)] = whole
    os.close(descriptor)
    return path.read_bytes(), bytes(expected)


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_lands_where_it_belongs_and_no_other_changes(seed, tmp_path: Path) -> None:
    found, expected = written(tmp_path / "file", DirectWriter(), seed)
    assert found == expected


def test_a_file_system_that_refuses_is_asked_once_and_served_the_ordinary_way(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        asked.append(offset)
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(direct.os, "pwrite", refuse)
    writer = DirectWriter()
    found, expected = written(tmp_path / "file", writer, 1)
    assert found == expected
    assert len(asked) <= 1 and not writer.works


def test_a_write_that_was_cut_short_is_finished(tmp_path: Path, monkeypatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(direct.os, "pwrite", lambda fd, data, offset: real(fd, data[:BLOCK], offset))
    found, expected = written(tmp_path / "file", DirectWriter(), 2)
    assert found == expected


def test_a_full_disk_is_reported_and_leaves_the_file_in_ordinary_use(tmp_path: Path, monkeypatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "file"
    path.write_bytes(bytes(2 * WORTH))
    descriptor = os.open(path, os.O_RDWR)
    writer = DirectWriter()
    with monkeypatch.context() as patched:
        patched.setattr(direct.os, "pwrite", full)
        if not writer.works:
            pytest.skip("this system has no direct writes")
        with pytest.raises(OSError, match="full"):
            writer.write(descriptor, 0, [memoryview(bytes(WORTH))])
    writer.write(descriptor, 3, [memoryview(b"abc")])  # Not aligned: refused if the file were still open for such.
    assert os.pread(descriptor, 3, 3) == b"abc"
    os.close(descriptor)
