"""What the learner asks of whoever holds its models over several ranks.

All else it does with the parameters themselves: they are `DTensor`s, or plain where every rank has the whole, under
Hugging Face's names. By those alone a rank reads its part of a checkpoint, the norm of a gradient is added up, weights
are published, saved, read on another layout and exported.
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
    """A Hugging Face model, as a backend sees it."""

    entries: tuple[str, ...] = ()
    """What computes with whole weights beside `forward`."""
    sequence: SequenceRanks | None = None
    """The ranks that compute each pack together; set by the backend."""
    backend: Backend | None = None
    """Which holds it, once it does; None: this process has it whole, and alone."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf

    @property
    def layers(self) -> list[nn.Module]:
        """Its decoder layers, from within: Mamba names its blocks and the mixers in them."""
        classes = set(self.hf._no_split_modules or ())
        return [each for each in reversed(list(self.hf.modules())) if type(each).__name__ in classes]

    @property
    def device(self) -> torch.device:
        """On which it computes; its parameters may lie in host memory."""
        return next(self.parameters()).device if self.backend is None else device_of(self.backend.mesh)


class Backend(Protocol):
    """The ranks of a learner, laid out."""

    @property
    def mesh(self) -> DeviceMesh:
        """All of them."""
        ...

    @property
    def on_host(self) -> bool:
        """Between steps parameters and gradients lie in host memory, whatever computes: they are made, read and stepped
        over there."""
        ...

    def shard(self, model: HeldModel, compute: torch.dtype, before: Callable[[nn.Module], None] | None = None) -> None:
        """Leave this rank its part of every parameter of `model`, in place, and let `forward` and the `entries`
        compute with all that they need. Collective.

        The parameters may be on the meta device; their values come later, into what is left of them, or by
        `load_state_dict(assign=True)` of others that were left in the same way. Sets `model.backend`, and
        `model.sequence` where ranks share packs.

        Args:
            compute: dtype of the forward; weights and gradients keep theirs.
            before: called with each part of the model before it is cut.
        """
        ...

    def sync(self, model: HeldModel, now: bool) -> None:
        """Whether the next backward leaves in `.grad` the mean over all ranks of what each has accumulated; where it
        does not, ranks keep their own."""
        ...

    def settle(self, model: HeldModel) -> None:
        """After a forward without backward, come to its end or not: every parameter is this rank's part again."""
        ...
