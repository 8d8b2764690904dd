"""A run and its rerun: what can be compared, and how far apart the weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.cli.rerun import changed_by, weights_apart
from asyncrl.config import load_config
from asyncrl.errors import AsyncRLError
from asyncrl.telemetry.reports.rerun import comparison

GIVEN = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"]
ROWS = [{"step": 1, "loss/total": 0.25, "optim/grad_norm": 0.5, "kl/behavior": 0.125, "policy/entropy": 2.0}]


def test_numbers_of_two_losses_are_not_put_beside_each_other() -> None:
    alike, other = (comparison(ROWS, ROWS, same_loss=same) for same in (True, False))
    assert "0.25 / 0.25" in alike and "0.5 / 0.5" in alike
    *_, last = other.splitlines()
    assert last.startswith("loss/total and optim/grad_norm are left out, because the two runs minimise")
    assert "left out" not in alike and "loss/total" not in other.removesuffix(last)
    assert all("0.125 / 0.125" in text and "2 / 2" in text for text in (alike, other))


def test_what_a_rerun_changed_is_named_and_what_it_always_sets_is_not() -> None:
    recorded = load_config([*GIVEN, "loss=grpo", "learner.lr=1e-3"])
    again = load_config([*GIVEN, "loss=grpo", "learner.lr=1e-4", "replay.max_staleness=9", "rollout.workers=3"])
    again.learner.save_every = 0
    assert set(changed_by(again, recorded)) == {"learner.lr", "replay.max_staleness"}


def test_weights_of_any_number_of_files_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {"a": torch.full((3,), 2.0), "b": torch.ones(4, dtype=torch.bfloat16)}
    for name in ("one", "two", "less"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": tensors["b"] * 2}, tmp_path / "two" / "model-2.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "less" / "model.safetensors")
    assert weights_apart(tmp_path / "one", tmp_path / "two") == pytest.approx((4 / 16) ** 0.5)
    with pytest.raises(AsyncRLError, match="different tensors"):
        weights_apart(tmp_path / "one", tmp_path / "less")
