"""Counts the arithmetic of a train step, and its share of a GPU's peak (MFU)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.checks.architecture import of_its_decoder
from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.memory_plan import Sizes
from asyncrl.learner.model.attention_trial import kernel_of

PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12,
         "B200": 2250e12, "B100": 1750e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12,
         "A40": 150e12, "A10": 125e12, "L4": 121e12}  # fmt: skip
"""Dense bfloat16 FLOP/s from the vendor's data sheets, by words in `torch.cuda.get_device_name`; the first match
counts. Whole words only: an A10G or an RTX A4000 is neither an A10 nor an A40."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work per token of a decoder. A multiply-add counts as two operations; norms and activations are not counted."""

    linear: int
    """Weights that a token is multiplied with in the layers; of experts only those it is routed to."""
    head: int
    """Weights of the head, which is applied only to tokens of the loss."""
    attention: int
    """Number of layers times heads times their width."""

    @classmethod
    def of(cls, hf: nn.Module, config: Mapping[str, Any], head: nn.Module) -> Work:
        """Counted from the weights, and for attention from the field names that all Hugging Face configs use."""
        model, linear = of_its_decoder(config), 0.0
        experts = model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0
        sent_to = (model.get("num_experts_per_tok") or 0) / experts if experts else 0.0
        for module in hf.modules():
            if isinstance(module, nn.Embedding) or module is head:
                continue
            for each in module.parameters(recurse=False):
                linear += each.numel() * (sent_to if each.ndim == 3 and experts else float(each.ndim >= 2))
        sizes = Sizes.of(model)
        kinds = model.get("layer_types") or ()
        layers = sum("attention" in kind for kind in kinds) if kinds else (sizes.layers if sizes else 0)
        return cls(
            linear=round(linear),
            head=sum(each.numel() for each in head.parameters() if each.ndim == 2),
            attention=layers * sizes.queries if sizes else 0,
        )

    def forward(self, *, tokens: int, scored: int, pairs: int) -> int:
        """Operations of a forward pass.

        Args:
            tokens: number of tokens that go through the layers.
            scored: number of tokens that the head is applied to.
            pairs: number of pairs of a query and a key that it sees.
        """
        return 2 * self.linear * tokens + 2 * self.head * scored + 4 * self.attention * pairs


def operations(work: Work, batches: Iterable[MicroBatch], passes: int) -> float:
    """Operations of training on these micro-batches. A shared prompt goes through the layers once, and is attended to
    by each of its completions. Recomputation by activation checkpointing, and scoring before the first update, are not
    counted.

    Args:
        passes: 1 for the forward, plus 1 each for the gradients of a layer's input and of its weight (see `passes_of`).
    """
    total = 0
    for batch in batches:
        tokens, scored = len(batch.input_ids), len(batch.loss_positions)
        total += work.forward(tokens=tokens, scored=scored, pairs=batch.packing.pairs)
    return float(passes * total)


def padding(batches: Iterable[MicroBatch], *, in_rows: bool, compute: torch.dtype) -> dict[str, tuple[float, float]]:
    """Share of the computation that is padding and no token of a trajectory, as (padding, all) sums: in the layers, and
    in attention, where the keys of a shared prompt count once per completion.

    Args:
        in_rows: each trajectory runs in a row of its own (`layout.Layout.ROWS`).
        compute: dtype that the model computes in.
    """
    of_layers, of_attention = (0.0, 0.0), (0.0, 0.0)
    for batch in batches:
        packing, there = batch.packing, bool(batch.members)  # an empty batch is computed only to join collectives
        rows, tokens = len(packing.lengths) * packing.max_length, len(batch.input_ids)
        any_length = in_rows or kernel_of(batch.input_ids.device, compute).any_length
        real = packing.real(any_length=any_length)
        slots = rows if in_rows else packing.slots(any_length=any_length)
        computed, useful = (rows, real) if in_rows else (tokens, tokens)
        of_layers = of_layers[0] + computed - useful * there, of_layers[1] + computed
        of_attention = of_attention[0] + slots - real * there, of_attention[1] + slots
    return {"perf/padding_share": of_layers, "perf/attention_padding_share": of_attention}


def passes_of(*, adapted: bool, warming_up: bool) -> int:
    """For `operations`: with adapters weights get no gradient; while the critic warms up there is no backward."""
    if warming_up:
        return 1
    return 2 if adapted else 3


def peak_of(device: torch.device) -> float | None:
    """Peak FLOP/s of the GPU; None for an unknown model, and without a GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)


def speed(operations: float, tokens: float, seconds: float, ranks: int, peak: float | None) -> dict[str, float]:
    """`perf/*` of a step: rates per rank over the seconds that it trained.

    Args:
        operations, tokens: of all ranks together.
        seconds: time spent training; 0 if there was none.
    """
    if seconds <= 0:
        return {"perf/tflops_per_rank": 0.0, "perf/tokens_per_s_per_rank": 0.0}
    rate = operations / seconds / ranks
    row = {"perf/tflops_per_rank": rate / 1e12, "perf/tokens_per_s_per_rank": tokens / seconds / ranks}
    return row if peak is None else row | {"perf/mfu": rate / peak}
