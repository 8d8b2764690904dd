"""Which kernel of attention a rank uses: the first choice that works.

A kernel is tried on a small pack before it is used, forward and backward: it may be built for another torch or GPU, and
nothing else would show that it computes something else.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.attention
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from asyncrl.learner.model.attention_kernel import BLOCKS, FLASH3, Kernel, There, choose
from asyncrl.learner.model.attention_rows import Rows, attend

TRIED = (150, 1, 43)
"""Lengths of the rows: more than a tile, a single token, and one that begins within a tile."""
NEAR = {torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Norm of the error over that of the result, up to which a kernel computes the same. The rounding of each is a tenth of
it at most (float32: with TF32); a mask that is off by one key passes none."""


@cache
def kernel_of(device: torch.device, dtype: torch.dtype, width: int = 0) -> Kernel:
    """The kernel that a rank uses: the first choice that works. Once FlashAttention-3's wheel is chosen, torch uses it
    for the whole process."""
    there = There.of(device)
    while True:
        found = choose(there, dtype, width)
        if found.name == BLOCKS:
            return found
        # In a thread of its own: the caller's modes and hooks, such as those of activation checkpointing, end there.
        with ThreadPoolExecutor(1) as apart:
            problem = apart.submit(tried, found.name, device, dtype, width or 64).result()
        if not problem:
            return found
        there = replace(there, failed=(*there.failed, (found.name, problem)))


def tried(kernel: str, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why the kernel cannot be used: what it raises, or how far results or gradients are from those of torch on the
    CPU; empty if it can."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on GPU 0, where others' code may launch what is meant here
        if kernel == FLASH3:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        problem = next(filter(None, (_apart(kernel, device, dtype, width, window) for window in (None, 20))), "")
    # Any error: it is others' code, compiled for some torch, GPU and driver, and there is another way to compute this.
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if problem and kernel == FLASH3:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    return problem


def _apart(kernel: str, device: torch.device, dtype: torch.dtype, width: int, window: int | None) -> str:
    slots, rows = sum(TRIED), Rows.of(np.array(TRIED), device)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(slots, heads, width, generator=generator).to(dtype) for heads in (6, 2, 2, 6)]

    def computed(where: torch.device, exact: torch.dtype, how: Callable[..., Tensor]) -> list[Tensor]:
        *inputs, towards = (tensor.to(where, exact) for tensor in drawn)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        out = how(*inputs)
        results = (out, *torch.autograd.grad(out, inputs, towards))
        return [tensor.detach().to("cpu", torch.float64) for tensor in results]

    wanted = computed(torch.device("cpu"), torch.float64, lambda q, k, v: plainly(q, k, v, TRIED, width**-0.5, window))
    found = computed(device, dtype, lambda q, k, v: attend(kernel, q, k, v, rows, width**-0.5, window))
    errors = [((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in zip(found, wanted, strict=True)]
    if all(error <= NEAR[dtype] for error in errors):  # not so of NaN
        return ""
    what = ("the output", "the gradient of queries", "the gradient of keys", "the gradient of values")
    worst = max(range(len(errors)), key=lambda index: (errors[index] != errors[index], errors[index]))
    return f"{what[worst]} is off by {errors[worst]:.1g} of its norm, window {window}"


def plainly(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float, window: int | None
) -> Float[Tensor, "slots heads value_dim"]:
    """The same, row by row."""
    edges, rows = np.append(0, np.cumsum(lengths)).tolist(), []
    for first, last in pairwise(edges):
        places = torch.arange(last - first, device=q.device)
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < (last - first if window is None else window))
        of_q, of_k, of_v = (tensor[first:last].transpose(0, 1)[None] for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(of_q, of_k, of_v, mask, scale=scale, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)
