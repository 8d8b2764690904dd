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
