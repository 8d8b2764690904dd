"""Writes the tensors of a checkpoint into its files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.learner.parallel.collectives import barrier
from asyncrl.storage.full_disk import disk_full, disk_space, is_full


def write_tensors(tensors: dict[str, Any], aside: Path, *, rank: int, group: dist.ProcessGroup | None) -> None:
    """Write `tensors` to the folder `aside`. Collective over `group` (None: this rank alone): all ranks see the failure
    of one.

    Raises:
        CheckpointException: a rank could not write.
        DiskFullError: there was no space for one of them.
    """
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(tensors))
    if rank == 0:
        with disk_space(aside, nbytes):
            _make_empty(aside)
    if group is not None:
        barrier(group)
    try:
        state_dict_saver.save(tensors, checkpoint_id=aside, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if not any(is_full(failure, aside.parent, nbytes) for failure, _ in error.failures.values()):
            raise
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # an incomplete checkpoint, whose space may be needed elsewhere
        raise disk_full(aside, nbytes) from error


def said_of(error: BaseException) -> str:
    """The messages of all ranks that failed; torch's own text of a CheckpointException has their tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def named_tensors(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested dictionary, including other ranks' shards, under the names that DCP gives them."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{name}.")
