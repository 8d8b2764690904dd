"""Interface of a backend, which holds the learner's models over several ranks.

Everything else the learner does with the parameters themselves. They are `DTensor`s, or plain tensors if every rank has
the whole, under Hugging Face's names. With nothing more than that, a rank reads its part of a checkpoint, and gradient
norms are computed and weights are published, saved, loaded on another layout and exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from asyncrl.learner.parallel.sequence import SequenceRanks
from asyncrl.learner.parallel.sharding import device_of


class HeldModel(nn.Module):
    """A Hugging Face model as a backend sees it."""

    entries: tuple[str, ...] = ()
    """Names of methods besides `forward` that compute with whole weights."""
    sequence: SequenceRanks | None = None
    """The ranks that share each pack; set by the backend."""
    backend: Backend | None = None
    """The backend, once it holds the model; None: this process alone has it, whole."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def layers(self) -> list[nn.Module]:
        """Its decoder layers, innermost first: Mamba lists both its blocks and the mixers within them."""
        classes = set(self.hf._no_split_modules or ())
        return [each for each in reversed(list(self.hf.modules())) if type(each).__name__ in classes]

    @property
    def device(self) -> torch.device:
        """Device on which it computes; its parameters may be in host memory."""
        return next(self.parameters()).device if self.backend is None else device_of(self.backend.mesh)


class Backend(Protocol):
    """The layout of a learner's ranks."""

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of all ranks."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether parameters and gradients are in host memory between steps, whatever device computes; they are then
        allocated, read and stepped there."""
        ...

    def shard(self, model: HeldModel, compute: torch.dtype, before: Callable[[nn.Module], None] | None = None) -> None:
        """Replace, in place, every parameter of `model` by this rank's part, so that `forward` and the `entries`
        compute with whole weights. Collective.

        The parameters may be on the meta device. Their values are set later, by writing to the remaining parts, or by
        `load_state_dict(assign=True)` of others that were sharded in the same way. Sets `model.backend`, and
        `model.sequence` if ranks share packs.

        Args:
            compute: dtype of the forward; weights and gradients keep theirs.
            before: called with each part of the model before it is sharded.
        """
        ...

    def sync(self, model: HeldModel, now: bool) -> None:
        """Set whether the next backward leaves in `.grad` the mean over all ranks of the accumulated gradients; if not,
        each rank keeps its own."""
        ...

    def settle(self, model: HeldModel) -> None:
        """Call after a forward without backward, even if it failed: every parameter becomes this rank's part again."""
        ...
