"""A full disk: writers wait, report path and bytes once a minute, continue, and end in time."""

from __future__ import annotations

import errno
import io
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncrl.errors import DiskFullError
from asyncrl.storage.full_disk import BOARD_BYTES, FullDisk, Patience, append_whole, make_board, post, read_board
from asyncrl.storage.log_stream import KEPT_BYTES, LogStream


@dataclass
class Time:
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def no_space() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_writer_waits_says_so_once_a_minute_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    time = Time()
    path = tmp_path / "metrics.jsonl"

    def write() -> int:
        return no_space() if time.now < 150 else 7

    assert Patience(3600, None, time.clock, time.sleep).through(path, 12_345, write) == 7
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(". Nothing is lost; ")[1].split(" of ")[0] for text in said[:-1]] == [
        "waited 0 s for space,",
        "waited 60 s for space,",
        "waited 120 s for space,",
    ]
    assert all(f"{path} needs 12,345 bytes" in text for text in said[:-1])
    assert said[-1] == "there is space again after 150 s: going on"


def test_after_its_patience_it_ends_with_path_bytes_and_the_way_to_go_on(tmp_path: Path) -> None:
    time = Time()
    board = tmp_path / "waiting"
    make_board(board)
    with pytest.raises(DiskFullError, match=r"full for 90 s \(run\.disk_pat.*=90\).*metrics.*7 bytes.*resume=auto"):
        Patience(90, board, time.clock, time.sleep).through(tmp_path / "metrics.jsonl", 7, no_space)
    assert time.now == 90
    assert "resume=auto" in read_board(board)


def test_what_is_no_want_of_space_is_raised_at_once(tmp_path: Path) -> None:
    def broken() -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        Patience(90).through(tmp_path / "a", 1, broken)


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


def test_a_wait_that_is_over_begins_anew(tmp_path: Path) -> None:
    time = Time()
    full = FullDisk(Patience(100, None, time.clock, time.sleep))
    for _ in range(3):
        full.note(tmp_path, 1)
        time.now += 99
        full.note(tmp_path, 1)
        full.over()


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
