"""The arithmetic counted for a train step, against torch's own counter and formulas written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.model.flops import Work, operations, padding, passes_of, peak_of, speed
from tests.learner.feed import make_lease, make_step, tiny_model

TOKENS = 24


def work_of(hf: Any) -> Work:
    return Work.of(hf, hf.config.to_dict(), hf.get_output_embeddings())


def moe() -> Any:
    kind: Any = Qwen3MoeConfig  # its signature lacks head_dim
    config = kind(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        decoder_sparse_step=1, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


MODELS = {
    "dense": lambda: tiny_model("llama", num_key_value_heads=2),
    "gqa": lambda: tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=1),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_counts_what_torch_counts(kind: str):
    hf: Any = MODELS[kind]()
    hf.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        hf(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    # Its attention computes every pair, those that are masked out, too.
    assert work_of(hf).forward(tokens=TOKENS, scored=TOKENS, pairs=TOKENS**2) == counter.get_total_flops()


def test_a_mixture_counts_the_experts_that_a_token_is_sent_to():
    attention = 32 * (64 + 32 + 32) + 64 * 32
    experts = 2 * 3 * 32 * 24
    router = 32 * 6
    work = work_of(moe())
    assert work == Work(linear=2 * (attention + experts + router), head=96 * 32, attention=2 * 4 * 16)
    hand = 2 * 10 * work.linear + 2 * 3 * 96 * 32 + 4 * 128 * 55
    assert work.forward(tokens=10, scored=3, pairs=55) == hand


def test_a_tied_embedding_is_a_head_and_no_weight_of_every_token():
    tied, untied = (work_of(tiny_model("qwen2", tie_word_embeddings=tie)) for tie in (True, False))
    assert tied == untied and tied.head == 264 * 32


def test_a_step_counts_a_shared_prompt_once_and_what_sees_it_each_time():
    plan, groups = make_step(3, max_staleness=4)
    lease = make_lease(plan, groups)
    members = sorted(lease.trajectories)
    batch = pack(lease, members, torch.device("cpu"))
    lengths = [len(lease.trajectories[member].token_ids) for member in members]
    work = Work(linear=7, head=5, attention=3)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    once = 2 * 7 * len(batch.input_ids) + 2 * 5 * len(batch.loss_positions) + 4 * 3 * pairs
    assert len(batch.input_ids) < sum(lengths)
    assert operations(work, [batch, batch], 3) == 2 * 3 * once


def test_passes_are_those_that_run():
    assert passes_of(adapted=False, warming_up=False) == 3
    assert passes_of(adapted=True, warming_up=False) == 2
    assert passes_of(adapted=False, warming_up=True) == 1


def test_a_share_of_the_peak_is_known_where_the_peak_is():
    assert peak_of(torch.device("cpu")) is None
    row = speed(8e12, 4000.0, 2.0, 4, None)
    assert row == {"perf/tflops_per_rank": 1.0, "perf/tokens_per_s_per_rank": 500.0}
    assert speed(8e12, 4000.0, 2.0, 4, 5e12)["perf/mfu"] == pytest.approx(0.2)
    assert "perf/mfu" not in speed(8e12, 4000.0, 0.0, 4, 5e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
     ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12), ("NVIDIA H200", 989e12), ("Somebody's", None),
     ("NVIDIA GH200 480GB", 989e12), ("NVIDIA A10G", None), ("NVIDIA RTX A4000", None)],
)  # fmt: skip
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of(torch.device("cuda", 0)) == peak


def test_a_pack_pads_attention_alone_and_rows_pad_everything():
    plan, groups = make_step(3, max_staleness=4)
    lease = make_lease(plan, groups)
    members = sorted(lease.trajectories)
    full, empty = (pack(lease, chosen, torch.device("cpu")) for chosen in (members, []))
    lengths = [len(lease.trajectories[member].token_ids) for member in members]
    blocks = sum(rows * length for rows, length in full.packing.padded.shapes)
    assert blocks > sum(lengths), "the feed has nothing to pad"
    packed = padding([full, empty], in_rows=False, compute=torch.float32)
    assert packed["perf/padding_share"] == (1, len(full.input_ids) + 1)
    assert packed["perf/attention_padding_share"] == (blocks - sum(lengths) + 1, blocks + 1)
    in_rows = padding([full], in_rows=True, compute=torch.float32)
    slots = len(lengths) * max(lengths)
    assert set(in_rows.values()) == {(slots - sum(lengths), slots)}
    assert full.packing.slots(any_length=True) == sum(lengths)
    assert full.packing.slots(any_length=False) == blocks
