"""Meeting points of the learner ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist


def barrier() -> None:
    """Return when every rank is here; at once where there is only one. Bounded by the process group's timeout."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def text_of_rank_zero(text: str, device: torch.device) -> str:
    """What rank 0 was called with, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    said = text.encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(said)], device=device)
    dist.broadcast(size, src=0)
    letters = torch.frombuffer(bytearray(said[: int(size)].ljust(int(size) + 1)), dtype=torch.uint8).to(device)
    dist.broadcast(letters, src=0)
    return letters.cpu().numpy().tobytes()[: int(size)].decode()


def choice_of_rank_zero(path: Path | None, device: torch.device) -> Path | None:
    """What rank 0 was called with, on every rank. Collective.

    Ranks that each look for the newest checkpoint may find different ones (a shared disk that lags, a node that
    torchrun does not count as restarted) and would load shards of different steps.
    """
    chosen = text_of_rank_zero(str(path or ""), device)
    return Path(chosen) if chosen else None


def sum_over_ranks(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of everyone's float64 `values`, of equal shape, on the CPU. Collective; `device` is where ranks meet."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    shared = values.to(device, copy=True)
    dist.all_reduce(shared)
    return shared.cpu()
