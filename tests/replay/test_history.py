"""`ledger.jsonl`: what is written, and that the writer forgets what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.replay import events as ev
from asyncrl.replay.history import LEDGER_FILE, LedgerFile


def test_a_step_trained_again_after_a_restore_names_its_groups_both_times_and_nothing_is_kept(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / LEDGER_FILE)
    for version in (1, 3):
        ledger(ev.Sealed(step=0, policy_version=0, ahead=0, members=(4, 7)))
        ledger(ev.Trained(step=0, policy_version=version))
        ledger(ev.Restored(step=-1, policy_version=-1))
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
