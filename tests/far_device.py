"""A simulated device, with values in host memory, that counts how often the host waits for it.

Its tensors claim to be on `meta`, and torch computes their values on the CPU. Operations that a GPU would refuse
(tensors of two devices in one operation) are refused. Operations that make the host wait for a GPU (reading its values,
shapes that depend on them, blocking copies) are noted with their place in the code.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten
FAR = torch.device("meta")
ASKED = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount,
    aten.equal, aten.is_nonzero, aten.unique_consecutive,
}  # fmt: skip
"""Operations whose result on the host, or its shape, depends on values on the device."""


class FarTensor(Tensor):
    """A tensor on the simulated device; `near` holds its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    def __repr__(self, *_: Any) -> str:
        return f"far({self.near!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # torch's own does not work for a wrapper subclass
            return args[0].cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a far tensor outside its device: within `with FarDevice()` alone")


class FarDevice(TorchDispatchMode):
    """A mode in which `device="meta"` is the simulated device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """The waits, each as the innermost place in asyncrl and the operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        far = [each for each in given if isinstance(each, FarTensor)]
        lost = [each for each in given if each.is_meta and not isinstance(each, FarTensor)]
        if lost:
            raise RuntimeError(f"{func} of a tensor that was made on the far device beside it, and has no values")
        to = kwargs.get("device")
        wanted = FAR if to is not None and torch.device(to) == FAR else None
        if not far and wanted is None:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        moved = packet in (aten._to_copy, aten.copy_)
        self._note(func, packet, moved, far, given, args, kwargs)
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        near_args, near_kwargs = tree_map_only(FarTensor, lambda each: each.near, (args, kwargs))
        out = func(*near_args, **near_kwargs)
        if packet is aten._local_scalar_dense or (to is not None and wanted is None):
            return out
        out = tree_map_only(Tensor, FarTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if far else out

    def _note(
        self, func: Any, packet: Any, moved: bool, far: list[FarTensor], given: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        near = [each for each in given if not isinstance(each, FarTensor) and each.ndim]
        picks = packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
        if far and near and not moved:
            raise RuntimeError(f"{func} of tensors on two devices, at {_place()}")
        waits = packet in ASKED
        waits |= packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if picks:
            masks = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
            filled = packet is not aten.index and args[2].numel() == 1
            waits |= masks and not filled
        if moved and packet is aten._to_copy:
            crosses = kwargs.get("device") is not None and (torch.device(kwargs["device"]) == FAR) != bool(far)
            waits |= crosses and not (kwargs.get("non_blocking") and not far)
        elif moved:
            crosses = isinstance(args[0], FarTensor) != isinstance(args[1], FarTensor)
            waits |= crosses and not (len(args) > 2 and args[2] and isinstance(args[0], FarTensor))
        if waits:
            self.waits.append(f"{_place()} {packet}")


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/asyncrl/" in frame.filename]
    if not frames:
        return "elsewhere"
    return f"{frames[-1].filename.rpartition('/asyncrl/')[2]}:{frames[-1].lineno}"


def take_far(model: nn.Module) -> None:
    """Move the parameters and buffers of `model` to the simulated device. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, each in list(module._parameters.items()):
            if each is not None:
                if id(each) not in made:
                    made[id(each)] = nn.Parameter(FarTensor(each.data), each.requires_grad)
                module._parameters[name] = made[id(each)]
        for name, each in list(module._buffers.items()):
            if each is not None:
                module._buffers[name] = FarTensor(each)
