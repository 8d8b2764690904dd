from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.schema import Config
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.weights.adapter import SCALING, read_pairs
from tests.learner.rank_process import train_on_ranks
from tests.learner.smooth_steps import EQUAL, RATE, apart
from tests.learner.tiny_config import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(900)]


def make_config(folder: Path, run: str, **model: object) -> Config:
    learner = {"steps": 4, "lr": RATE, "save_every": 2}
    adapters = {"lora_rank": 3, "lora_alpha": 6, **model}
    loss = LossConfig(kl_coef=0.05)  # against the base: the policy with its adapters off
    return tiny_config(folder, run, kv_heads=2, model=adapters, learner=learner, loss=loss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the finished runs `one` and `two`, of one and of two ranks, the latter with activation checkpointing; LoRA
    rank 3 does not divide among two."""
    folder = tmp_path_factory.mktemp("ranks")
    train_on_ranks(make_config(folder, "one"), 1)
    train_on_ranks(make_config(folder, "two", activation_checkpointing=True), 2)
    return folder


def published(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "published.safetensors")


def first(folder: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(folder / run / "first.safetensors")


def test_two_ranks_that_checkpoint_activations_learn_the_same_adapters_as_one_that_keeps_them(folder: Path):
    one, two = published(folder, "one"), published(folder, "two")
    assert apart(one, two, first(folder, "one")) < EQUAL
    assert all(pair.b.abs().max() > 1e-3 for pair in read_pairs(one).values())


def test_an_export_of_sharded_adapters_is_the_base_with_what_was_published(folder: Path):
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "two" / "hf").named_parameters())
    pairs = read_pairs(published(folder, "two"))
    for name, weight in AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters():
        pair = pairs.get(name.removesuffix(".weight"))
        want = weight if pair is None else pair.added_to(weight.detach(), 6 / 3)
        torch.testing.assert_close(exported[name], want)


def test_adapters_resume_on_another_number_of_ranks(folder: Path):
    half_way = folder / "two" / "ckpt" / "step_2"
    shutil.copytree(half_way, folder / "resumed" / "ckpt" / "step_2")
    (folder / "resumed" / "ckpt" / "latest").symlink_to("step_2")
    resumed = train_on_ranks(make_config(folder, "resumed"), 1, resume=True)
    assert apart(published(folder, "two"), resumed, first(folder, "two")) < EQUAL


@pytest.mark.long
def test_ranks_that_compute_layers_together_learn_export_and_resume_the_same_adapters(folder: Path):
    together = make_config(folder, "together")
    together.learner.tensor_parallel = 2
    assert apart(published(folder, "one"), train_on_ranks(together, 4), first(folder, "one")) < EQUAL
    one, other = (AutoModelForCausalLM.from_pretrained(folder / run / "hf") for run in ("one", "together"))
    for (name, weight), found in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, weight, msg=name)
    half_way = folder / "two" / "ckpt" / "step_2"
    again = make_config(folder, "to compute together")
    again.learner.tensor_parallel = 2
    shutil.copytree(half_way, folder / "to compute together" / "ckpt" / "step_2")
    (folder / "to compute together" / "ckpt" / "latest").symlink_to("step_2")
    assert apart(published(folder, "two"), train_on_ranks(again, 2, resume=True), first(folder, "two")) < EQUAL


def test_bfloat16_computes_near_float32_and_keeps_float32_adapters(folder: Path):
    weights = train_on_ranks(make_config(folder, "half", dtype="bfloat16"), 1)
    row, exact = (load_file(folder / run / "row.safetensors") for run in ("half", "one"))
    assert {tensor.dtype for name, tensor in weights.items() if name != SCALING} == {torch.float32}
    assert math.isclose(row["policy/entropy"].item(), exact["policy/entropy"].item(), abs_tol=0.1)
    assert row["optim/trained_parameters"] == sum(t.numel() for t in weights.values()) - 2
