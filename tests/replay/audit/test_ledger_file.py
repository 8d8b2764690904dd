"""`ledger.jsonl`: what is written, and that the writer forgets what it wrote."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path

import pytest

from asyncrl.replay.audit.ledger_file import BLOCK, LEDGER_FILE, LedgerFile, LedgerThread, lines_from_the_end
from asyncrl.replay.core.durable import events as ev


def test_a_step_trained_again_after_a_restore_names_its_groups_both_times_and_nothing_is_kept(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / LEDGER_FILE)
    ledger(ev.Sealed(step=0, policy_version=0, ahead=0, members=(4, 7)))
    for version in (1, 3):
        ledger(ev.Trained(step=0, policy_version=version))
        ledger(ev.Restored(step=-1, policy_version=-1, again=True))
    ledger(ev.Committed(step=0))
    rows = [json.loads(line) for line in (tmp_path / LEDGER_FILE).read_text().splitlines()]
    trained = [row for row in rows if row["event"] == "trained"]
    assert [(row["groups"], row["policy_version"]) for row in trained] == [([4, 7], 1), ([4, 7], 3)]
    assert not ledger._members  # kept, they would grow with every step of the run


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_a_killed_server_s_missing_lines_are_added_and_lines_of_what_never_was_durable_are_cut(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    history = [ev.Published(0, -1), ev.Sealed(0, 0, 0, (1, 2)), ev.Trained(0, 1), ev.Committed(0), ev.Published(2, 1)]
    for durable in (2, 3, 5):
        killed = LedgerFile(path)
        for event in history:  # Lines reach the file with the third event.
            killed(event)
        with path.open("a") as file:
            file.write('{"event": "half a l')
        again = LedgerFile(path)
        for count, event in enumerate(history[:durable], start=1):
            again.replayed(count, event)
        again(ev.Finished())
        assert numbers(path) == list(range(1, durable + 2))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["groups"] for row in rows if row["event"] == "trained"] == [[1, 2]] * (durable > 2)
        path.unlink()


def test_a_start_that_fails_before_the_learner_is_there_leaves_no_lines_out(tmp_path: Path) -> None:
    """Its journal begins after them."""
    path = tmp_path / LEDGER_FILE
    history = [ev.Published(0, -1), ev.Sealed(0, 0, 0, (1, 2)), ev.Trained(0, 1), ev.Published(2, 1), ev.Committed(0)]
    killed = LedgerFile(path)
    for event in history:  # the last two are in the journal alone
        killed(event)
    failed, again = LedgerThread(LedgerFile(path)), LedgerFile(path)
    for count, event in enumerate(history, start=1):
        failed.replayed(count, event)
    failed.recovered()
    failed.close()
    again.replayed(6, ev.Issued(3, 3, 0, "w", "i", 2, 2))
    again(ev.Finished())
    assert numbers(path) == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_power_loss_left_of_the_file_does_not_keep_the_server_from_starting(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    killed = LedgerFile(path)
    for event in (ev.Published(0, -1), ev.Sealed(0, 0, 0, (1, 2)), ev.Trained(0, 1)):
        killed(event)
    with path.open("ab") as file:
        file.write(b"\x00" * 300 + b"\xff\n")
    again = LedgerFile(path)
    for count, event in enumerate((ev.Published(0, -1), ev.Sealed(0, 0, 0, (1, 2)), ev.Trained(0, 1)), start=1):
        again.replayed(count, event)
    again(ev.Finished())
    assert numbers(path) == [1, 2, 3, 4]


def test_the_caller_does_not_wait_for_the_disk_of_the_ledger_and_nothing_is_missing_at_the_end(tmp_path: Path) -> None:
    path, disk, began = tmp_path / LEDGER_FILE, threading.Event(), threading.Event()

    class Slow(LedgerFile):
        def _write(self) -> None:
            began.set()
            assert disk.wait(60)
            super()._write()

    ledger = LedgerThread(Slow(path))
    for step in range(100):  # Each of them is written; the first never comes to an end before the disk moves.
        ledger(ev.Trained(step, step + 1))
    assert began.wait(60) and not path.exists()
    disk.set()
    ledger.close()
    assert numbers(path) == list(range(1, 101))


def test_a_ledger_that_cannot_be_written_ends_the_server_rather_than_going_on_without_lines(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ledger = LedgerThread(LedgerFile(tmp_path / "file" / LEDGER_FILE))
    ledger(ev.Trained(0, 1))
    ledger._thread.join(60)
    with pytest.raises(OSError, match="file"):
        ledger(ev.Committed(0))
    with pytest.raises(OSError, match="file"):
        ledger.close()


def test_a_long_ledger_is_cut_to_what_is_durable_without_being_read_into_memory(tmp_path: Path) -> None:
    path, count = tmp_path / LEDGER_FILE, 150_000
    with path.open("w") as file:
        file.writelines(
            f'{{"event": "committed", "step": {n}, "pad": "{"x" * 40}", "n": {n}}}\n' for n in range(1, count)
        )
        file.write('{"event": "half a l')
    assert path.stat().st_size > 10 * BLOCK
    again = LedgerFile(path)
    durable = count // 2
    tracemalloc.start()
    try:
        again.replayed(durable, ev.Committed(durable))
        again._cut_after(durable)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * BLOCK, "a block, its lines, and what is left of the one before"
    again(ev.Finished())
    assert [number for _, number in zip(range(2), last_numbers(path), strict=False)] == [durable + 1, durable]


def last_numbers(path: Path):
    return (json.loads(line)["n"] for _, line in lines_from_the_end(path))


@pytest.mark.parametrize("content", ["", "a", "a\n", "a\nbb\n\nccc\ndddd", "\n\n", "x" * 9 + "\n" + "y" * 9])
@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_lines_come_from_the_end_whole_and_with_where_they_end(
    content: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.replay.audit.ledger_file.BLOCK", block)
    path = tmp_path / "lines"
    path.write_text(content)
    found = list(lines_from_the_end(path))
    assert [line for _, line in reversed(found)] == content.encode().splitlines(keepends=True)
    assert [end for end, _ in found] == [
        len(content) - sum(len(line) for _, line in found[:i]) for i in range(len(found))
    ]
