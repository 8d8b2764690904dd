"""The choice of the kernel for packed attention, a pure function, and its line at the start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, Qwen2Config, Qwen3Config

from asyncrl.learner.model.attention_kernel import (
    BLOCKS,
    FLASH,
    FLASH3,
    FLASH3_CACHED,
    FLEX,
    There,
    choose,
    widest_head,
)
from asyncrl.learner.model.building import describe_attention
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import build_model
from asyncrl.schema import Config, ModelConfig
from tests.learner.feed import tiny_checkpoint

HOPPER = There("cuda", (9, 0), flash3=True, cached=True, triton=True)
BF16, FP32 = torch.bfloat16, torch.float32

CHOICES = {
    "cpu": (There("cpu", triton=True), BF16, 64, BLOCKS, "the device is cpu"),
    "float32 on a GPU": (HOPPER, FP32, 64, FLEX, "flex_attention, compiled: .*model.dtype is float32"),
    "float32 without triton": (replace(HOPPER, triton=False), FP32, 64, BLOCKS, "model.dtype is float32"),
    "an old GPU": (
        There("cuda", (7, 5), triton=True), torch.float16, 64, BLOCKS, "need compute capability 8.0, .* has 7.5",
    ),
    "wide heads": (HOPPER, BF16, 512, FLEX, "up to 256, and these have 512"),
    "ampere": (There("cuda", (8, 6), flash3=True, cached=True), BF16, 256, FLASH, "capability 8.6"),
    "hopper": (There("cuda", (9, 0)), BF16, 128, FLASH, "neither flash_attn_interface is installed nor kernels-comm"),
    "hopper with the wheel": (HOPPER, BF16, 128, FLASH3, "flash_attn_interface is installed"),
    "hopper with a cached build": (replace(HOPPER, flash3=False), BF16, 128, FLASH3_CACHED, "in the cache of kernels"),
    "hopper with a broken wheel": (
        replace(HOPPER, failed=((FLASH3, "no such symbol"),)), BF16, 128, FLASH3_CACHED,
        r"in the cache.*; flash3 is there and cannot be used \(no such symbol\)",
    ),
    "hopper with both broken": (
        replace(HOPPER, failed=((FLASH3, "x"), (FLASH3_CACHED, "y"))), BF16, 128, FLASH, "does not work; flash3 .*y",
    ),
    "no flash at all": (
        replace(HOPPER, failed=((FLASH3, "x"), (FLASH3_CACHED, "y"), (FLASH, "z"))), BF16, 128, FLEX, "no flash kernel",
    ),
    "nothing works": (
        replace(HOPPER, failed=tuple((name, "z") for name in (FLASH3, FLASH3_CACHED, FLASH, FLEX))), BF16, 128, BLOCKS,
        "rows of similar length: no flash kernel works here; .*flex is there and cannot be used",
    ),
    "blackwell": (There("cuda", (10, 0), flash3=True), torch.float16, 128, FLASH, "capability 10.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_follows_from_what_is_there_and_says_why(name: str):
    there, dtype, width, wanted, why = CHOICES[name]
    found = choose(there, dtype, width)
    assert found.name == wanted and found.any_length == (wanted != BLOCKS)
    assert re.search(why, found.why), found.why


def test_the_widest_head_is_that_of_queries_keys_or_values():
    assert widest_head(Qwen2Config(hidden_size=64, num_attention_heads=4)) == 16
    assert widest_head(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32)) == 32
    assert widest_head(DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)) == 192


def test_a_model_on_a_cpu_says_that_rows_of_like_length_go_together(tmp_path: Path):
    config = Config(model=ModelConfig(path=str(tiny_checkpoint(tmp_path))))
    model = build_model(config, torch.device("cpu"), None)
    assert "rows of similar length: the device is cpu" in describe_attention(model, config.model)
    model.layout = Layout.ROWS
    assert "transformers' own" in describe_attention(model, config.model)
