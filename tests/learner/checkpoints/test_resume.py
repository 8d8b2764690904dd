"""What a learner finds of the run that it resumes."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.learner.checkpoints.resume import Start, kept_rows
from asyncrl.types import NO_VERSION


def test_rows_of_a_line_that_was_left_again_do_not_stay(tmp_path: Path) -> None:
    """Steps 9 to 12 were trained from version 1 on, then once more from 21 on; the first line is gone on with."""
    assert kept_rows(tmp_path, Start(step=12, policy_version=40, parent=13)) == 12
    versions = {step: step + 1 if step <= 8 else step + 13 for step in range(1, 13)}
    rows = [{"step": step, "policy_version": version, "loss/total": 0.5} for step, version in versions.items()]
    rows.append({"step": 8, "policy_version": 21, "eval/heldout/accuracy": 0.5, "eval/heldout/count": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert kept_rows(tmp_path, Start(step=12, policy_version=40, parent=13)) == 8
    assert kept_rows(tmp_path, Start(step=12, policy_version=40, parent=25)) == 12
    assert kept_rows(tmp_path, Start(step=0, policy_version=40, parent=NO_VERSION)) == 0
