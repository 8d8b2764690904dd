"""Spans: what a process records of itself, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import spans
from asyncrl.errors import RunFolderError
from asyncrl.telemetry.trace import chrome_events, life_of, read_trace, records


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs" / "trace"
    spans._forget()


def test_where_nothing_is_traced_nothing_is_written_and_nothing_fails(folder: Path) -> None:
    with spans.span("a", group=1) as one:
        one.also(tokens=3)
    spans.lap("b")
    spans.moment("c")
    spans.clocks("elsewhere", 1, 1)
    assert spans.since_lap() == 0 and not folder.exists()


def test_spans_of_threads_have_their_lane_and_laps_leave_no_gap(folder: Path, tmp_path: Path) -> None:
    spans.begin(folder, "a role/of mine")
    spans.lap("start")

    def work() -> None:
        with spans.span("inside", version=3):
            pass

    thread = threading.Thread(target=work, name="side")
    with spans.span("outside", step=1) as outside:
        thread.start()
        thread.join()
        outside.also(tokens=5)
    spans.lap("work", step=1)
    spans.end()
    (process,) = read_trace(tmp_path)
    assert (process.role, process.pid, process.accounted()) == ("a role/of mine", os.getpid(), 1.0)
    assert process.begin == process.born < time.monotonic_ns() - 1_000_000, "it began when the process did"
    start, inside, outside_, work_, end = process.spans
    assert [each.name for each in process.spans] == ["start", "inside", "outside", "work", "end"]
    assert inside.lane == "side" and {each.lane for each in (start, outside_, work_, end)} == {spans.MAIN}
    assert outside_.begin <= inside.begin <= inside.end <= outside_.end
    assert (start.begin, start.end, work_.end) == (process.born, work_.begin, end.begin)
    assert outside_.of == {"step": 1, "tokens": 5} and inside.of == {"version": 3}


def test_a_killed_process_leaves_all_spans_that_had_ended_and_a_forked_child_none(folder: Path, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            spans.begin(folder, "killed")
            for number in range(100):
                with spans.span("work", group=number):
                    pass
            grandchild = os.fork()
            if grandchild == 0:
                spans.moment("of the grandchild")
                os._exit(0)
            os.waitpid(grandchild, 0)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (process,) = read_trace(tmp_path)
    assert process.pid == child and [each.of["group"] for each in process.spans] == list(range(100))


def test_a_file_is_bounded_and_keeps_the_newest(folder: Path, tmp_path: Path) -> None:
    spans.begin(folder, "long", limit=10_000)
    for number in range(5000):
        spans.moment("work", group=number)
    assert len(list(folder.iterdir())) == 2
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * 10_000 + 1000
    (process,) = read_trace(tmp_path)
    kept = [each.of["group"] for each in process.spans]
    assert kept == list(range(kept[0], 5000)) and len(kept) > 100


def test_of_a_role_that_is_started_again_and_again_the_newest_files_are_kept(folder: Path) -> None:
    for number in range(spans.FILES_KEPT + 3):
        file = spans.SpanFile(folder, "role")
        file._path = folder / f"role@{number:04}-1{spans.SUFFIX}"
        file.write(["a", "main", 1, 2, {}])
        file._close()
    kept = sorted(path.name for path in folder.iterdir())
    assert len(kept) == spans.FILES_KEPT + 1 and kept[-1].startswith("role@0010"), "the others, and the one that began"


def test_a_full_disk_costs_spans_and_no_record_is_torn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = spans.SpanFile(folder, "full")
    file.write(["a", "main", 1, 2, {}])
    whole, write = os.write, os.write
    monkeypatch.setattr(os, "write", lambda handle, content: whole(handle, content[:3]))
    file.write(["lost", "main", 1, 2, {}])
    monkeypatch.setattr(os, "write", write)
    file.write(["b", "main", 1, 2, {}])
    head, *rest = records(file._path)
    assert head["role"] == "full" and [row[0] for row in rest] == ["a", "b"] and file.lost == 1
    file._close()


def test_what_is_damaged_is_read_up_to_there(folder: Path, tmp_path: Path) -> None:
    spans.begin(folder, "cut")
    for number in range(3):
        spans.moment("work", group=number)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-4])
    (process,) = read_trace(tmp_path)
    assert [each.of["group"] for each in process.spans] == [0, 1]
    (folder / f"empty@1-2{spans.SUFFIX}").touch()
    assert len(read_trace(tmp_path)) == 1


def test_whatever_byte_is_wrong_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    spans.begin(folder, "wrong")
    spans.moment("work", group=1, groups=[2], version=3, turn=0)
    spans.clocks("another machine", 5, 3)
    spans.lap("serve", step=1)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    shown = 0
    for place in range(len(content)):
        wrong = (0x00, 0x80, 0x90, 0xC0, 0xFF)[place % 5]
        path.write_bytes(content[:place] + bytes([wrong]) + content[place + 1 :])
        with contextlib.suppress(RunFolderError):  # where it is in the head
            found = read_trace(tmp_path)
            shown += len(json.dumps(list(chrome_events(found)))) > 0
            life_of(found, group=1, version=3)
    assert shown > len(content) / 5


def test_a_file_that_somebody_deleted_is_made_again(folder: Path) -> None:
    file = spans.SpanFile(folder, "gone", limit=1000)
    file.write(["a", "main", 1, 2, {}])
    file._path.unlink()
    for number in range(200):
        file.write(["b", "main", number, number, {}])
    assert file._path.exists() and file.lost == 1, "the one that found it gone"
    file._close()
