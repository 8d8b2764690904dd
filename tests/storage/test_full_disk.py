"""A full disk: one error with path, bytes and the way to go on, and nothing half written."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from pathlib import Path

import pytest

from asyncrl.errors import DiskFullError
from asyncrl.storage.full_disk import BOARD_BYTES, append_whole, disk_full, disk_space, make_board, post, read_board
from asyncrl.storage.log_stream import KEPT_BYTES, LogStream


def no_space() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_space_is_one_sentence_with_path_bytes_and_the_way_to_go_on(tmp_path: Path) -> None:
    board = tmp_path / "logs" / "waiting"
    board.parent.mkdir()
    make_board(board)
    path = tmp_path / "ckpt" / "step_2"
    sentence = r"ckpt/step_2 needs 12,345 bytes and .* are free.*resume=auto"
    with pytest.raises(DiskFullError, match=sentence) as raised, disk_space(path, 12_345):
        no_space()
    assert read_board(board) == str(raised.value), "the logs are on the full disk"


def test_bytes_that_are_missing_are_counted(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert re.search(r" are free, [\d,]+ too few\. ", str(disk_full(tmp_path / "a", 2 * free)))
    assert "too few" not in str(disk_full(tmp_path / "a", 1)), "a quota does not show in the free space"


def test_what_is_no_want_of_space_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken") as raised, disk_space(tmp_path / "a", 1):
        raise OSError(errno.EIO, "broken")
    assert not isinstance(raised.value, DiskFullError)


def test_the_board_can_be_written_when_nothing_else_can_and_holds_the_newest_word(tmp_path: Path) -> None:
    board = tmp_path / "waiting"
    post(board, "nobody made it")
    assert read_board(board) == "" and not board.exists()
    make_board(board)
    assert read_board(board) == ""
    for text in ("a" * 2 * BOARD_BYTES, "short"):
        post(board, text)
        assert read_board(board) == text[: BOARD_BYTES - 1]
        assert board.stat().st_size == BOARD_BYTES


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\n")

    class Short(io.FileIO):
        def write(self, data: bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().write(data[:3])

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(Path, "open", lambda path, *_, **__: Short(path, "a"))
        append_whole(path, b"a new line\n")
    assert path.read_bytes() == b"whole\n"


def test_a_log_on_a_full_disk_holds_its_lines_back_ends_nobody_and_counts_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, room = bytearray(), [0]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if descriptor != 999:
            return real(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: room[0]]
        room[0] -= len(taken)
        written.extend(taken)
        return len(taken)

    monkeypatch.setattr(os, "write", write)
    stream = io.TextIOWrapper(LogStream(999), write_through=True)  # pyright: ignore[reportArgumentType]
    print("first", file=stream, flush=True)
    print("x" * KEPT_BYTES, file=stream, flush=True)
    room[0] = 3
    print("second", file=stream, flush=True)
    assert written == b"fir"
    room[0] = 1 << 30
    print("third", file=stream, flush=True)
    text = written.decode()
    assert text.startswith("first\nsecond\nthird\n") or text.startswith("first\n\nsecond\nthird\n")
    assert "bytes of this log were left out while the disk was full" in text
