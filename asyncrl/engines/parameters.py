"""The engine's parameters by Hugging Face name: all are validated, then swapped in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.errors import ModelMismatchError
from asyncrl.weights.base import StagedTensors


class ParameterTable:
    """The model's parameters. Tied parameters are one tensor with several names; an update may use any of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._by_name = dict(model.named_parameters(remove_duplicate=False))
        self._required = dict(model.named_parameters())
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}

    def outlines(self) -> dict[str, torch.Tensor]:
        """Tensors of an update, by name; only shape and dtype matter."""
        return self._required | self._buffers

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise for an update that does not fit, before anything is changed.

        Raises:
            ModelMismatchError: a parameter is unknown, missing or of another shape or kind of dtype; names the first
                one.
        """
        for name, tensor in tensors.items():
            target = self._target(name)
            if target is None:
                raise ModelMismatchError(f"unknown parameter {name!r}: the engine's model has no such name")
            if target.shape != tensor.shape:
                got, want = tuple(tensor.shape), tuple(target.shape)
                raise ModelMismatchError(f"parameter {name!r} has shape {got}, the engine's model needs {want}")
            if target.is_floating_point() != tensor.is_floating_point():
                raise ModelMismatchError(
                    f"parameter {name!r} has dtype {tensor.dtype}, which does not cast to {target.dtype}"
                )
        given = {id(self._target(name)) for name in tensors}
        for name, parameter in self._required.items():
            if id(parameter) not in given:
                raise ModelMismatchError(
                    f"parameter {name!r} is missing: an update carries every parameter of the model"
                )

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors in place (cast and moved as needed); `check` has passed before.

        Staged tensors that need neither cast nor move replace the parameters' memory: the engine is paused meanwhile,
        and not copying is fastest.
        """
        keep = isinstance(tensors, StagedTensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                target = self._target(name)
                assert target is not None
                if keep and (tensor.dtype, tensor.device) == (target.dtype, target.device):
                    tensors.kept = True
                    target.data = tensor
                else:
                    target.copy_(tensor)

    def _target(self, name: str) -> torch.Tensor | None:
        found = self._by_name.get(name)
        return found if found is not None else self._buffers.get(name)
