"""AdamW whose moments are kept in 8 bits (`learner.optimizer=adamw_8bit`).

Each element of a matrix's moment is stored as one of 256 levels between -1 and 1 (second moment: between 0 and 1),
times the largest of the 32 elements of its block: block-wise dynamic quantisation, arXiv 2110.02861, section 2. Blocks
lie within rows, and ranks split matrices between rows, or at the end of a block. So codes and scales are sharded like
their parameter, and a checkpoint is read bit for bit on any layout.
"""

# Ours, because torchao's cuts blocks out of whatever part of a parameter a rank has: no other layout could read them.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.checks.architecture import BLOCK, torn_blocks
from asyncrl.errors import ConfigError
from asyncrl.learner.memory_plan import in_eight_bits
from asyncrl.learner.optimizer.one_by_one import MOMENTS, OneByOne, step_one
from asyncrl.weights.publishing.sharding import local

SCALE = "_scale"
"""Suffix to the name of a moment, in the state of a parameter and in checkpoints."""
CHUNK = 1 << 20
"""Elements of a parameter that are stepped at once; each takes about 30 bytes of temporary memory."""


@cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """[256] float32, ascending: 0, 1, and for each decade from 1e-6 up twice as many as in the one below, each at the
    middle of its share of the decade. If `signed`, half of them are negative; -1 is not among them."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@cache
def _between(signed: bool, device: torch.device) -> Tensor:
    """[255] boundaries at which the nearest level changes."""
    every = levels(signed, device)
    return (every[1:] + every[:-1]) / 2


def quantise(moment: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Round to the nearest levels. A second moment above 0 never becomes 0, because its element would then step by its
    first moment over eps.

    Args:
        moment: [R, N] float32, with N a multiple of BLOCK.

    Returns:
        Codes [R, N] uint8, and scales [R, N / BLOCK] float32.
    """
    blocks = moment.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(shares, _between(signed, moment.device), out_int32=True)
    if not signed:
        codes = codes.maximum((blocks > 0).int())
    return codes.to(torch.uint8).flatten(-2), scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """[R, N] float32 of the codes [R, N] and scales [R, N / BLOCK]."""
    shares = levels(signed, codes.device)[codes.int()]
    return (shares.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


def check_blocks(parameters: Iterable[Tensor]) -> None:
    """Raises ConfigError if a rank would hold part of a block."""
    for parameter in parameters:
        problem = torn_blocks(parameter.shape[-1], local(parameter).shape[-1]) if parameter.ndim > 1 else ""
        if problem:
            raise ConfigError(problem)


class EightBits(OneByOne):
    """Steps matrices one chunk at a time; parameters that are not `in_eight_bits` have their moments in float32. Needs
    no compiler. The step uses the moments as computed; they are rounded afterwards, for the next step."""

    def _step_of(self, parameter: nn.Parameter, kept: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if not kept:
            kept |= _nothing_yet(parameter)
        assert parameter.grad is not None
        values, gradient, count = local(parameter), local(parameter.grad), kept["step"]
        if MOMENTS[0] + SCALE not in kept:
            step_one(values, gradient, [count, *(local(kept[name]) for name in MOMENTS)], group)
            return
        width = values.shape[-1]
        # A view, because a copy would be stepped instead of the parameter.
        rows, gradients = values.view(-1, width), gradient.reshape(-1, width)
        coded = [
            (
                local(kept[name]).view(-1, width),
                local(kept[name + SCALE]).view(-1, width // BLOCK),
                name == MOMENTS[0],
            )
            for name in MOMENTS
        ]
        at_once = max(1, CHUNK // width)
        for begin in range(0, len(rows), at_once):
            cut = slice(begin, begin + at_once)
            moments = [dequantise(codes[cut], scales[cut], signed=signed) for codes, scales, signed in coded]
            step_one(rows[cut], gradients[cut], [count.clone(), *moments], group)  # a clone, because each chunk counts
            for (codes, scales, signed), moment in zip(coded, moments, strict=True):
                codes[cut], scales[cut] = quantise(moment, signed=signed)
        count.add_(1)

    def _home(self, parameter: nn.Parameter) -> torch.device:
        return parameter.device


def in_fewer_bits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any moment is kept in 8 bits."""
    return any(MOMENTS[0] + SCALE in kept for kept in optimizer.state.values())


def _nothing_yet(parameter: nn.Parameter) -> dict[str, Tensor]:
    kept = {"step": torch.zeros((), device=parameter.device)}
    if not in_eight_bits(parameter.shape):
        return kept | {name: torch.zeros_like(parameter) for name in MOMENTS}
    for name in MOMENTS:
        kept[name] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
        kept[name + SCALE] = _scales_of(parameter)
    return kept


def _scales_of(parameter: nn.Parameter) -> Tensor:
    """A scale of 0 for every block: with it all codes mean 0."""
    part = local(parameter)
    scales = torch.zeros((*part.shape[:-1], part.shape[-1] // BLOCK), device=part.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    whole = torch.empty(shape, device="meta")
    sharded = DTensor.from_local(
        scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=whole.stride()
    )
    return sharded.to(part.device)  # with learner.offload=all, from_local has moved them to the mesh's device
