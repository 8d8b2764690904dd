"""All-to-all: each rank sends rows to every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Rows = Sequence[int] | None


def exchanged(rows: Tensor, group: dist.ProcessGroup, sent: Rows = None, got: Rows = None) -> Tensor:
    """Exchange [sum of `sent`, ...] for [sum of `got`, ...]: the first `sent[0]` rows go to rank 0 of `group` and so
    on; those received from rank 0 come first. Gradients go the opposite way. Collective.

    Args:
        sent, got: number of rows to, and from, each rank; None is the same number for all.
    """
    return _Exchanged.apply(rows, group, sent, got)  # pyright: ignore[reportReturnType]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: Rows, got: Rows) -> Tensor:
        ctx.group, ctx.sent, ctx.got = group, sent, got
        return _exchange(rows, group, sent, got)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.group, ctx.got, ctx.sent), None, None, None


def _exchange(rows: Tensor, group: dist.ProcessGroup, sent: Rows, got: Rows) -> Tensor:
    came = rows.new_empty(len(rows) if got is None else sum(got), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), got and list(got), sent and list(sent), group=group)
    return came
