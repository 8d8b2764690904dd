"""Collectives of the learner ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Done = TypeVar("Done")

SERVE_EVERY_S = 0.2

MEET_EVERY_S = 15.0
"""Seconds between collectives of the other ranks while one rank works; less than any process group's timeout."""


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank is here; at once if there is only one. Bounded by the process group's timeout."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group)


def is_first() -> bool:
    """Whether this is rank 0, or the only rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def however_long(
    work: Callable[[], Done],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    serve: Callable[[], None] | None = None,
) -> Done:
    """Run `work`, which may take longer than the process group's timeout, and return its result. Collective: a rank
    that is done waits for the others; unblocked when they are done, or when one of them dies.

    Args:
        group: process group of the collectives, here and below. None is the one that training uses, which a thread
            beside training must not use.
        serve: called by all ranks together several times a second while one of them works.
    """
    every_s = MEET_EVERY_S if serve is None else SERVE_EVERY_S
    with ThreadPoolExecutor(1) as pool:
        mine: Future[Done] = pool.submit(work)
        while True:
            with contextlib.suppress(FutureTimeout):
                mine.exception(timeout=every_s)
            working = torch.tensor([float(not mine.done())], dtype=torch.float64)
            if not sum_over_ranks(working, device, group).item():
                return mine.result()
            if serve is not None:
                serve()


def text_of_rank_zero(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Rank 0's argument, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    said = text.encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(said)], device=device)
    dist.broadcast(size, src=0, group=group)
    letters = torch.frombuffer(bytearray(said[: int(size)].ljust(int(size) + 1)), dtype=torch.uint8).to(device)
    dist.broadcast(letters, src=0, group=group)
    return letters.cpu().numpy().tobytes()[: int(size)].decode()


def texts_of_ranks(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """The arguments of all ranks, one line each, in the order of ranks. Collective."""
    assert "\n" not in text
    line = torch.frombuffer(bytearray(f"{text}\n".encode()), dtype=torch.uint8).to(device)
    return gather_over_ranks(line, group).cpu().numpy().tobytes().decode().splitlines()


def choice_of_rank_zero(path: Path | None, device: torch.device) -> Path | None:
    """Rank 0's argument, on every rank. Collective.

    If each rank looked for the newest checkpoint, they could find different ones (a shared disk that lags, a node that
    torchrun does not count as restarted) and would load shards of different steps.
    """
    chosen = text_of_rank_zero(str(path or ""), device)
    return Path(chosen) if chosen else None


class _Data:
    """Process groups for this process's sequences, see `train_apart`."""

    group: dist.ProcessGroup | None = None
    ranks: int | None = None
    sequence: dist.ProcessGroup | None = None


def train_apart(*, sequence: int, tensor: int) -> None:
    """Declare that from now on `sequence * tensor` neighbouring ranks have the same sequences. Sums over sequences are
    then taken over ranks with different ones. Every `tensor`-th of the neighbours shares their tokens. Collective; the
    initial state is 1 and 1."""
    world, together = dist.get_world_size(), sequence * tensor
    _Data.group, _Data.ranks, _Data.sequence = None, None, None
    if together > 1:
        _Data.group = _group_of_mine([list(range(first, world, together)) for first in range(together)])
        _Data.ranks = world // together
    if sequence > 1:
        firsts = [start + t for start in range(0, world, together) for t in range(tensor)]
        _Data.sequence = _group_of_mine([list(range(first, first + together, tensor)) for first in firsts])


def _group_of_mine(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make every group, in the same order on every process, and return this process's own."""
    made = [dist.new_group(members) for members in groups]
    (mine,) = (group for group, members in zip(made, groups, strict=True) if dist.get_rank() in members)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def sequence_group() -> dist.ProcessGroup | None:
    """The ranks that share each pack with this one; None if it has packs of its own."""
    return _Data.sequence


def data_ranks() -> int:
    """Number of ranks with different sequences."""
    if _Data.ranks is not None:
        return _Data.ranks
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_data(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`sum_over_ranks` of values that belong to sequences, counting each sequence once. Collective."""
    return sum_over_ranks(values, device, _Data.group)


def texts_of_data(text: str, device: torch.device) -> list[str]:
    """`texts_of_ranks` of texts that belong to sequences, with each sequence once. Collective."""
    return texts_of_ranks(text, device, _Data.group)


def gather_over_data(values: torch.Tensor) -> torch.Tensor:
    """`gather_over_ranks` of values that belong to sequences, with each sequence once. Collective."""
    return gather_over_ranks(values, _Data.group)


def sum_over_ranks(values: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over ranks of float64 `values` of equal shape, on the CPU. Collective; `device` is used for communication."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    shared = values.to(device, copy=True)
    dist.all_reduce(shared, group=group)
    return shared.cpu()


def everywhere(holds: bool, device: torch.device) -> bool:
    """Whether `holds` is true on every rank. Collective."""
    return not sum_over_ranks(torch.tensor([float(not holds)], dtype=torch.float64), device).item()


def gather_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate the 1-D `values` of all ranks, of any length, by rank, on this rank's device. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    size = torch.tensor([len(values)], device=values.device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(one) for one in sizes)
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    return torch.cat([part[: int(one)] for part, one in zip(everyone, sizes, strict=True)])


def summed_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`, without gradient. Collective."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


Operation = Callable[[Tensor], Tensor]


def through(x: Tensor, there: Operation, back: Operation) -> Tensor:
    """`there(x)`; the gradient of `x` is `back` of that of the result."""
    return _Through.apply(x, there, back)  # pyright: ignore[reportReturnType]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


Rows = Sequence[int] | None


def exchanged(rows: Tensor, group: dist.ProcessGroup, sent: Rows = None, got: Rows = None) -> Tensor:
    """Exchange [sum of `sent`, ...] for [sum of `got`, ...]: the first `sent[0]` rows go to rank 0 of `group` and so
    on; those received from rank 0 come first. Gradients go the opposite way. Collective.

    Args:
        sent, got: number of rows to, and from, each rank; None is the same number for all.
    """
    return through(rows, lambda x: _exchange(x, group, sent, got), lambda grad: _exchange(grad, group, got, sent))


def _exchange(rows: Tensor, group: dist.ProcessGroup, sent: Rows, got: Rows) -> Tensor:
    came = rows.new_empty(len(rows) if got is None else sum(got), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), got and list(got), sent and list(sent), group=group)
    return came
