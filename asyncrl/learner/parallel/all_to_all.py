"""All to all: each rank sends every other some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Rows = Sequence[int] | None


def exchanged(rows: Tensor, group: dist.ProcessGroup, sent: Rows = None, got: Rows = None) -> Tensor:
    """[all of `got`, ...] of [all of `sent`, ...]: the first `sent[0]` rows go to rank 0 of `group` and so on, and what
    came from rank 0 is the first. The gradients go the way back. Collective.

    Args:
        sent, got: rows to, and from, each rank; None is as many to all.
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
