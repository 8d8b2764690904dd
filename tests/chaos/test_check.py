"""The verdict computes staleness by itself, along the learner's own line of versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .check import Verdict, check_staleness
from .settings import ChaosSettings


def restored(version: int, parent: int) -> dict[str, Any]:
    return {"what": "restore", "version": version, "parent": parent}


def trained(version: int, *made_by: int, digest: str = "") -> dict[str, Any]:
    groups = [{"versions": list(made_by)}]
    return {"what": "trained", "version": version, "parent": version - 1, "groups": groups, "digest": digest or version}


def judged(tmp_path: Path, *rows: dict[str, Any]) -> Verdict:
    verdict = Verdict()
    check_staleness(ChaosSettings(folder=str(tmp_path), address=""), verdict, list(rows))
    return verdict


def test_a_token_two_steps_old_is_within_the_bound_and_one_of_three_is_not(tmp_path: Path) -> None:
    line = [restored(0, -1), trained(1, 0), trained(2, 0), trained(3, 0)]
    assert judged(tmp_path, *line).max_staleness == 2
    assert judged(tmp_path, *line).passed
    assert not judged(tmp_path, *line, trained(4, 0)).passed


def test_steps_trained_again_on_the_same_groups_are_the_same_weights(tmp_path: Path) -> None:
    """2 and 3 were undone: 4 is 1 under a new number, 5 is 2. From 4 to 3 it is two steps, from 5 one."""
    line = [restored(0, -1), trained(1, 0), trained(2, 1, digest="b"), trained(3, 2), restored(4, 1)]
    assert judged(tmp_path, *line, trained(5, 4, digest="b"), trained(6, 3)).max_staleness == 1
    assert judged(tmp_path, *line, trained(5, 4, digest="c"), trained(6, 3)).max_staleness == 3


def test_after_a_restart_other_groups_make_the_undone_weights_as_far_as_the_way_back_and_forth(tmp_path: Path) -> None:
    """2 and 3 were undone: 4 is 1 under a new number. From 4 to 3 it is two steps, from 5 three."""
    line = [restored(0, -1), trained(1, 0), trained(2, 1), trained(3, 2), restored(4, 1)]
    assert judged(tmp_path, *line, trained(5, 3, 1)).max_staleness == 2
    assert not judged(tmp_path, *line, trained(5, 4), trained(6, 3)).passed


def test_the_first_weights_published_again_are_the_same(tmp_path: Path) -> None:
    assert judged(tmp_path, restored(0, -1), restored(1, -1), trained(2, 0), trained(3, 0)).max_staleness == 1
