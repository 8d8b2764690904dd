"""Writes the tensors of a checkpoint into its files; on a full disk, as soon as there is space."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.learner.parallel.collectives import barrier
from asyncrl.storage.full_disk import RETRY_S, SAY_S, FullDisk, Patience, free_bytes, is_full


def write_tensors(
    tensors: dict[str, Any],
    aside: Path,
    make_room: Callable[[], None],
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    patience: Patience,
) -> None:
    """Write `tensors` to the folder `aside`. Collective over `group` (None: this rank alone), including every retry on
    a full disk: all ranks see the failure of one.

    Args:
        make_room: called on rank 0 while the disk is full, to delete what is not needed.

    Raises:
        CheckpointException: a rank could not write.
        DiskFullError: there was no space within the patience.
    """
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(tensors))
    full = FullDisk(patience)
    while True:
        if rank == 0:
            patience.through(aside, nbytes, lambda: _make_empty(aside))
        if group is not None:
            barrier(group)
        try:
            state_dict_saver.save(tensors, checkpoint_id=aside, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            if not any(is_full(failure, aside.parent, nbytes) for failure, _ in error.failures.values()):
                raise
        else:
            full.over()
            return
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # an incomplete checkpoint, whose space may be needed elsewhere
            _wait_for_space(full, aside, nbytes, patience, make_room)


def said_of(error: BaseException) -> str:
    """The messages of all ranks that failed; torch's own text of a CheckpointException has their tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())


def _wait_for_space(
    full: FullDisk, aside: Path, nbytes: int, patience: Patience, make_room: Callable[[], None]
) -> None:
    """Wait until it may fit, because writing a whole checkpoint every second would be a load of its own. A quota does
    not show in the free space, so another attempt is made once a minute in any case."""
    until = patience.clock() + SAY_S
    full.note(aside, nbytes)
    while patience.clock() < until:
        make_room()
        patience.sleep(RETRY_S)
        if free_bytes(aside.parent) >= nbytes:
            return
        full.note(aside, nbytes)


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
