"""Lines with checksums: every change or removal is found, and the file stays plain JSON lines. Without: rows that a
resume keeps."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc
from pathlib import Path

import pytest

from asyncrl.storage.lines import ChainedLineFile, Lines, Row, open_kept, read_lines, read_parts, row_of, rows_in

ROWS: list[Row] = [{"step": step, "text": f'a "quoted" ü {step}\n', "value": step / 7} for step in range(1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A chain, written by two processes."""
    file = tmp_path / "ledger.jsonl"
    ChainedLineFile(file).append(ROWS[:2])
    ChainedLineFile(file).append(ROWS[2:], ensure_ascii=False)
    return file


def read_chain(path: Path) -> Lines[Row]:
    return read_parts(path, lambda row: row, chained=True)


def keep_all(_: Row) -> bool:
    return True


def test_each_line_is_one_json_object_and_reads_back(path: Path) -> None:
    plain = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{name: value for name, value in row.items() if name != "crc"} for row in plain] == ROWS
    found = read_chain(path)
    assert found.rows == ROWS and not found.damaged


def test_no_flipped_bit_goes_unseen(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        found = read_chain(path)
        assert found.damaged or len(found.rows) < len(ROWS), f"byte {place}: {whole[place : place + 1]!r}"


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_line_that_is_gone_is_found_by_the_next(path: Path, gone: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    found = read_chain(path)
    assert found.damaged == [gone + 1]
    assert f"line {gone + 1} was changed" in found.problem(path)


def test_rows_that_are_not_kept_and_half_a_line_are_cut_off_in_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    open_kept(path, keep_all).append(ROWS)
    with path.open("a") as file:
        file.write('{"step": 6, "te')
    inode = path.stat().st_ino
    open_kept(path, lambda row: row["step"] <= 3).append([{"step": 4, "again": True}])
    assert path.stat().st_ino == inode  # a full disk has no room for a copy
    assert read_lines(path).rows == [*ROWS[:3], {"step": 4, "again": True}]
    assert "crc" not in path.read_text()


def test_a_line_that_cannot_be_read_is_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    open_kept(path, keep_all).append(ROWS)
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": ?'))
    open_kept(path, keep_all).append([{"step": 6}])
    found = read_lines(path)
    assert found.rows == [ROWS[0], *ROWS[2:], {"step": 6}] and found.unread == 1


def test_a_whole_number_that_no_float_holds_is_infinite_and_others_stay_as_they_are() -> None:
    for digits, sign in itertools.product((308, 309, 400, 5000), (1, -1)):
        found = row_of(f'{{"a": {"-" * (sign < 0)}{"9" * digits}, "b": [7, "{"1" * 400}"]}}'.encode())
        assert found == {"a": sign * (10**308 - 1 if digits == 308 else math.inf), "b": [7, "1" * 400]}
    assert row_of(b'{"a": 1' + b"0" * 308 + b"}") == {"a": 10**308}


def test_a_file_that_is_larger_than_memory_is_gone_on_with_and_looked_over(tmp_path: Path) -> None:
    """Of samples: 40 MB here, of which a few are held at a time."""
    text = "long " * 20_000
    path = tmp_path / "samples.jsonl"
    file = open_kept(path, keep_all)
    for step in range(6, 406):
        file.append([{"step": step, "text": text}])
    tracemalloc.start()
    try:
        steps = read_parts(path, lambda row: row["step"])
        open_kept(path, lambda row: row["step"] < 400)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert steps.rows[-1] == 405
    assert held < 20e6 < path.stat().st_size
    assert [row["step"] for row in rows_in(path)][-2:] == [398, 399]
