"""Weights are read by rank 0 alone; every other rank gets its shards from it, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl.learner.ranks import text_of_rank_zero
from asyncrl.storage.sealed import is_sealed, verify_export

Model = TypeVar("Model", bound=nn.Module)
REFUSALS = (OSError, KeyError, ValueError, RuntimeError, SafetensorError)
"""What transformers raises of a checkpoint that it cannot load; the last one of a file that was cut off."""


def load_proven(path: str, load: Callable[[], Model]) -> Model:
    """What `load` makes of the model in `path`; one that a run exported is compared with its manifest first.

    Raises:
        CheckpointError: naming the file that was damaged since.
    """
    if is_sealed(Path(path)):
        verify_export(Path(path))
    return load()


def load_on_rank_zero(load: Callable[[], Model], blank: Callable[[], Model], mesh: DeviceMesh | None) -> Model:
    """What `load` makes of the checkpoint; on the other ranks of `mesh` what `blank` makes of its config, without
    memory until `fill_from_rank_zero`. Collective.

    Raises:
        one of `REFUSALS`: of `load`; a ValueError that says the same on the other ranks,
            which would else wait for a rank that is gone.
    """
    if mesh is None or mesh.size() == 1:
        return load()
    device, refusal, model = device_of(mesh), None, None
    if dist.get_rank() == 0:
        try:
            model = load()
        except REFUSALS as error:
            refusal = error
    said = text_of_rank_zero("" if refusal is None else str(refusal) or repr(refusal), device)
    if said:
        raise refusal or ValueError(said)
    if model is None:
        with torch.device("meta"):
            model = blank()
    return model


def fill_from_rank_zero(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank what rank 0 has in `module`, as far as it is not sharded yet, bit for bit. Collective.

    Raises:
        RuntimeError: the ranks have built different models.
    """
    if mesh.size() == 1:
        return
    device, filled = device_of(mesh), {}
    for table, name, tensor in _unsharded(module):
        if tensor not in filled:
            whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.data.to(device)
            filled[tensor] = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
        table[name] = filled[tensor]  # the same one wherever it is tied to
    layout = "; ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in filled.values())
    if text_of_rank_zero(layout, device) != layout:
        raise RuntimeError(f"rank {dist.get_rank()} has built another {type(module).__name__} than rank 0: {layout}")
    for tensor in filled.values():
        dist.broadcast(tensor.data, src=0)


def device_of(mesh: DeviceMesh) -> torch.device:
    """On which the ranks meet."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _unsharded(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """`(where it stands, name, tensor)` of all parameters and buffers, tied ones once for each place."""
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is not None and not isinstance(tensor, DTensor):
                    yield table, name, tensor
