"""From a checkpoint to sharded weights. Each rank reads its own part of the files (`reading`), so that no rank holds
the whole model.

If this is not possible (no safetensors, files that differ between the ranks, weights that are computed during loading),
rank 0 reads everything and sends the others their shards, one layer at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.learner.backends.base import HeldModel
from asyncrl.learner.model.reading import (
    Checkpoint,
    EmptyOnMeta,
    Unreadable,
    pieces_of,
    without_weights,
)
from asyncrl.learner.parallel.collectives import text_of_rank_zero, texts_of_ranks
from asyncrl.learner.parallel.sharding import device_of
from asyncrl.storage.sealed import is_sealed, verify_export

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Held = TypeVar("Held", bound=HeldModel)
REFUSALS = (OSError, KeyError, ValueError, RuntimeError, SafetensorError)
"""Exceptions of transformers for a checkpoint that it cannot load; the last one for a truncated file."""


@contextmanager
def of_transformers() -> Iterator[None]:
    """Convert what the library raises for a checkpoint that it cannot load to one of `REFUSALS`: it has no exception
    class for that (an ImportError of a quantizer, a config that fails its own checks)."""
    try:
        yield
    except REFUSALS:
        raise
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


@contextmanager
def as_config_error(setting: str, kind: str, way_out: str) -> Iterator[None]:
    """Turn any error in loading the checkpoint of a setting, as a model of this kind, into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise  # is a ValueError too, but its message is complete
    except REFUSALS as error:
        raise ConfigError(f"{setting} cannot be loaded as {kind}: {error}. {way_out}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Generic[Held]):
    """How to make one model of a run from its checkpoint."""

    setting: str
    """The setting it comes from, for messages: `model.path=...`."""
    path: str
    load: Callable[[], PreTrainedModel]
    """Load it whole, with transformers. Raises one of `REFUSALS`."""
    build: Callable[[], PreTrainedModel]
    """Build it from its config, with random weights."""
    make: Callable[[PreTrainedModel], Held]
    """Make the learner's model of it."""
    kept: str
    """Dtype in which its weights are kept."""
    may_lack: Callable[[PreTrainedModel], list[str]] = lambda _: []
    """Names of parameters that start at 0 if the checkpoint lacks them."""
    needless: Callable[[Collection[str]], set[str]] = lambda _: set()
    """Which of these weights of the checkpoint, for which the model has no place, nothing needs."""
    change: Callable[[Held, nn.Module], None] = lambda *_: None
    """Changes the model once its layout is known, before it is sharded. The second argument holds the weights that were
    read; on several ranks the first has none yet."""
    start: Callable[[Held], None] = lambda _: None
    """Initialises the parameters that `change` has added."""

    def whole(self) -> PreTrainedModel:
        """Load the whole model. A checkpoint exported by a run is first compared with its manifest.

        Raises:
            CheckpointError: naming the file that was damaged since.
            one of `REFUSALS`: it cannot be loaded.
        """
        self.prove()
        return self.load()

    def blank(self) -> PreTrainedModel:
        """Build the model without weights, but with its buffers."""
        with EmptyOnMeta():
            return without_weights(self.build())

    def prove(self) -> None:
        """Compare an exported checkpoint with its manifest. Raises CheckpointError."""
        if is_sealed(Path(self.path)):
            verify_export(Path(self.path))


def own_part(recipe: Recipe[Held], blank: PreTrainedModel, mesh: DeviceMesh) -> Checkpoint | None:
    """The checkpoint, from which this rank reads its part of `blank`; None, with a log line, if the ranks cannot each
    read theirs. Collective."""
    device, part, said = device_of(mesh), None, "-"
    try:
        part = Checkpoint.of(recipe.path)
        part.pieces = pieces_of(blank, part.shapes, may_lack=recipe.may_lack(blank))
        if lost := (unexpected := part.unread(blank)) - recipe.needless(unexpected):
            raise Unreadable(f"it has {', '.join(sorted(lost)[:4])}, for which the model has no place")
        said = part.identity()
    except (Unreadable, *REFUSALS) as error:
        said = f"-{' '.join(str(error).split())}"
    told = texts_of_ranks(said, device)
    if len(set(told)) == 1 and not said.startswith("-"):
        return part
    whys = [each[1:] for each in told if each.startswith("-")]
    log.info(
        "rank 0 reads all of %s: %s", recipe.path, whys[0] if whys else "the ranks do not all have the same files there"
    )
    if part is not None:
        part.opened.close()
    return None


def on_rank_zero(work: Callable[[], Model | None], mesh: DeviceMesh) -> Model | None:
    """Run `work` on rank 0 and return its result; None on the others, which wait. Collective.

    Raises:
        one of `REFUSALS`: raised by `work`; on the other ranks a ValueError with the same message, because they would
            otherwise wait for a rank that has ended.
    """
    refusal, model = None, None
    if dist.get_rank() == 0:
        try:
            model = work()
        except REFUSALS as error:
            refusal = error
    said = text_of_rank_zero("" if refusal is None else str(refusal) or repr(refusal), device_of(mesh))
    if said:
        raise refusal or ValueError(said)
    return model


def fill_from_rank_zero(module: nn.Module, mesh: DeviceMesh) -> None:
    """Copy to every rank what rank 0 has in `module` and is not sharded yet, bit for bit. Collective.

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
        table[name] = filled[tensor]  # tied parameters stay the same object
    layout = "; ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in filled.values())
    if text_of_rank_zero(layout, device) != layout:
        raise RuntimeError(
            f"rank {dist.get_rank()} has built a different {type(module).__name__} than rank 0: {layout}"
        )
    for tensor in filled.values():
        dist.broadcast(tensor.data, src=0)


def _unsharded(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """`(table, name, tensor)` of all parameters and buffers; tied ones appear once per place."""
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is not None and not isinstance(tensor, DTensor):
                    yield table, name, tensor
