"""Finds which part of every tensor a loader reads, and provides tensors that hold only that part.

    recording    a loader is run over tensors without data: what it would copy out of them is recorded, by name
    loading      the same loader gets tensors of the full shape, which return the parts that are held

Both follow views only (`narrow`, `chunk`, indexing, `transpose` ...), as torch itself computes them without data. Any
other operation of a loader makes the whole tensor wanted, and it is then sent in full: correct in every case, only
larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, coalesced, contains, overlap, whole

VIEWS = frozenset({
    "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "__getitem__", "select", "unbind", "view",
    "view_as", "transpose", "swapaxes", "t", "permute", "movedim", "squeeze", "unsqueeze", "flatten", "unflatten",
    "detach", "__iter__",
})  # fmt: skip
"""Functions that return a part of a tensor, or the same elements in another order."""
VIEW_PROPERTIES = frozenset({torch.Tensor.data.__get__, torch.Tensor.T.__get__, torch.Tensor.mT.__get__})  # pyright: ignore[reportAttributeAccessIssue]
SHAPES = frozenset(
    {
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "__len__",
        "is_floating_point",
        "is_contiguous",
    }
)
"""Functions that do not depend on the values."""


class NotTheSameError(WeightsError):
    """A loader reads a part that it did not read when it was recorded."""


@dataclass(slots=True)
class Source:
    """One tensor: what is wanted of it, or held."""

    name: str
    shape: tuple[int, ...]
    held: Mapping[Box, torch.Tensor] | None = None
    """Disjoint boxes; None while recording."""
    wanted: set[Box] = field(default_factory=set)

    def read(self, box: Box) -> None:
        self.wanted.add(box)


class SlicedTensor(torch.Tensor):
    """A view of a `Source`. `outline` is the same view of a contiguous tensor without data."""

    _source: Source
    _outline: torch.Tensor

    @staticmethod
    def __new__(cls, source: Source, outline: torch.Tensor) -> SlicedTensor:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, outline.shape, strides=outline.stride(), storage_offset=outline.storage_offset(),
            dtype=outline.dtype, device=torch.device("cpu"),
        )  # fmt: skip
        made._source, made._outline = source, outline
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SlicedTensor({self._source.name}, {tuple(self._outline.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        ours = [each for each in args if isinstance(each, SlicedTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if len(ours) == 1 and not any(isinstance(each, SlicedTensor) for each in kwargs.values()):
                (one,) = ours
                if args[0] is one and (name in VIEWS or func in VIEW_PROPERTIES):
                    return one._viewed(func(one._outline, *args[1:], **kwargs))
                if args[0] is one and (name in SHAPES or name == "__get__"):
                    return func(*args, **kwargs)
                if name == "copy_" and len(args) > 1 and args[1] is one:
                    return one._copied(func, args[0], *args[2:], **kwargs)
            return _whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _whole(func, args, kwargs or {})

    def _viewed(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return SlicedTensor(self._source, found)
        return type(found)(map(self._viewed, found))

    def _copied(self, func: Callable[..., Any], into: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Copy a part into a parameter, or record it: the last thing that a loader does with it."""
        source = self._source
        box = box_of_view(source.shape, self._outline)
        if source.held is None:
            source.read(whole(source.shape) if box is None else box)
            return into
        return func(into, self._values(box), *args, **kwargs)

    def _values(self, box: Box | None) -> torch.Tensor:
        source, outline = self._source, self._outline
        assert source.held is not None
        if outline.numel() == 0:
            return torch.empty(outline.shape, dtype=outline.dtype)
        for held, values in source.held.items():
            if box is not None and contains(held, box):
                offset = sum((a - b) * step for (a, _), (b, _), step in zip(box, held, values.stride(), strict=True))
                axes = _axes(source.shape, outline)
                assert axes is not None
                strides = [1 if axis is None else values.stride(axis) for axis in axes]
                return values.as_strided(outline.shape, strides, values.storage_offset() + offset)
        raise NotTheSameError(
            f"vLLM's loader reads {box} of {source.name!r} {source.shape}, but only {sorted(source.held)} when its "
            "part was recorded. This is a defect of asyncrl or of this version of vLLM: report it with the model's name"
        )


def _whole(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Any other operation: every sliced tensor among its arguments is wanted whole."""

    def outline(value: Any) -> Any:
        if isinstance(value, SlicedTensor):
            source = value._source
            if source.held is not None:
                raise NotTheSameError(
                    f"vLLM's loader calls {getattr(func, '__name__', func)} with {source.name!r}, which it did not "
                    "when its part was recorded. This is a defect of asyncrl or of this version of vLLM: report it "
                    "with the model's name"
                )
            source.read(whole(source.shape))
            return value._outline
        if isinstance(value, (list, tuple)):
            return type(value)(map(outline, value))
        return value

    return func(*map(outline, args), **{key: outline(value) for key, value in kwargs.items()})


def _axes(shape: Sequence[int], view: torch.Tensor) -> list[int | None] | None:
    """Dimension of the source tensor that each dimension of its view is; None for one of size 1. Returns None if the
    view has other dimensions."""
    strides = {math.prod(shape[k + 1 :]): k for k in range(len(shape)) if shape[k] > 1}
    axes = [None if size == 1 else strides.get(step, -1) for size, step in zip(view.shape, view.stride(), strict=True)]
    known = [axis for axis in axes if axis is not None]
    return None if -1 in known or len(set(known)) < len(known) else axes


def box_of_view(shape: Sequence[int], view: torch.Tensor) -> Box | None:
    """The box that `view` covers of a contiguous tensor of `shape`; None if that is not a box."""
    if view.numel() == 0:
        return tuple((0, 0) for _ in shape)
    axes = _axes(shape, view)
    if axes is None:
        return None
    left, box = int(view.storage_offset()), []
    for k in range(len(shape)):
        start, left = divmod(left, math.prod(shape[k + 1 :]))
        size = view.shape[axes.index(k)] if k in axes else 1
        if start + size > shape[k]:
            return None  # merged dimensions
        box.append((start, start + size))
    return tuple(box)


Wanted = Mapping[str, tuple[Box, ...]]
"""Disjoint boxes by name; a tensor that is not named is wanted whole."""


def wanted_to_wire(wanted: Wanted) -> list[Any]:
    """msgpack-able and plain JSON; read back by `wanted_from_wire`."""
    return [[name, [[end for ends in box for end in ends] for box in boxes]] for name, boxes in wanted.items()]


def wanted_from_wire(wire: Iterable[Any]) -> dict[str, tuple[Box, ...]]:
    """Raises WeightsError if the input is not of that form, or boxes of one tensor overlap."""
    found: dict[str, tuple[Box, ...]] = {}
    for name, boxes in wire:
        found[str(name)] = tuple(tuple(zip(map(int, e[::2]), map(int, e[1::2]), strict=True)) for e in boxes)
        ends = [pair for box in found[str(name)] for pair in box]
        if not all(0 <= a < b for a, b in ends) or overlap(found[str(name)]):
            raise WeightsError(f"an engine wants {found[str(name)]} of {name!r}, which are not parts of a tensor")
    return found


def find_wanted(load: Callable[[list[tuple[str, torch.Tensor]]], Any], tensors: Mapping[str, torch.Tensor]) -> Wanted:
    """Return what `load` copies out of `tensors`, of which only shape and dtype are used. Its copies are not carried
    out, and its other operations run without data, so it must not depend on values."""
    sources = {name: Source(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    load([(name, SlicedTensor(source, _outline(tensors[name]))) for name, source in sources.items()])
    return {name: coalesced(source.wanted) for name, source in sources.items()}


def sliced(
    shapes: Mapping[str, torch.Tensor], held: Mapping[str, Mapping[Box, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return tensors for a loader: plain ones where the whole tensor is held, otherwise ones that know only their
    parts.

    Args:
        shapes: tensors without data, by name.
        held: parts by name and box.
    """
    made: dict[str, torch.Tensor] = {}
    for name, outline in shapes.items():
        shape = tuple(outline.shape)
        parts = held[name]
        if whole(shape) in parts:
            made[name] = parts[whole(shape)]
        else:
            made[name] = SlicedTensor(Source(name, shape, parts), _outline(outline))
    return made


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with memory of its own, so that the storage offset of a view tells its position."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
