"""GPUs for a machine without one: tensors that lie on the host and say that they are on `cuda:N`.

    with pretended_gpus(8): ...     torch sees 8 GPUs, and in every thread that starts inside

An operation on tensors of two devices fails as it would on a GPU, `.numpy()` fails, and a default device index is 0.
Streams are only names, so that a test can ask on which one a thread works. What the host does is what the GPU would do,
so results are those of a CPU. Only torch's Python functions are seen: what happens inside them is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DisableTorchFunctionSubclass as Plainly
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEFAULT = "default"
"""Name of the stream of a thread that has chosen none."""
_ACROSS = {"copy_", "_foreach_copy_", "_has_compatible_shallow_copy_type", "empty_like"}
"""Functions that take tensors of several devices, or do not look at one of them."""
_here = threading.local()
pinned: list[int] = []
"""Bytes of each tensor that was pinned."""


class DeviceError(RuntimeError):
    """Tensors of two devices in one operation."""


class OnGpu(torch.Tensor):
    where: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with Plainly():
            return _run(func, args, dict(kwargs or {}))


class _Pretence(TorchFunctionMode):
    """Sees functions without such a tensor among their arguments: those that make one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not any(isinstance(each, OnGpu | torch.device | str) for each in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with Plainly():
            return _run(func, args, kwargs)


class Stream:
    """Stands in for `torch.cuda.Stream` and `torch.cuda.Event`."""

    def __init__(self, device: Any = None, name: str = "", **_: Any) -> None:
        self.name = name or f"stream {id(self)}"

    def synchronize(self, *_: Any) -> None:
        """The host is always done."""

    record = wait_event = wait_stream = synchronize


def place_of(tensor: Any) -> torch.device | None:
    """The GPU that a tensor is on; None for the host."""
    return vars(tensor).get("where") if isinstance(tensor, OnGpu) else None


def stream_here() -> str:
    """Name of the stream that this thread works on."""
    return getattr(_here, "stream", DEFAULT)


def _gpu(device: Any) -> torch.device | None:
    """The GPU that is meant; None for the host."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return None
    return found if found.index is not None else torch.device("cuda", getattr(_here, "gpu", 0))


def _put(found: Any, place: torch.device | None) -> Any:
    if not isinstance(found, torch.Tensor) or place is None:
        return found
    if not isinstance(found, OnGpu):
        found = (found.data if isinstance(found, torch.nn.Parameter) else found).as_subclass(OnGpu)
    found.where = place
    return found


def _named(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", ""))


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name, given = _named(func), [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    places = {place_of(each) for each in given}
    home = next((place for place in places if place is not None), None)
    if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
        return home or func(*args)
    if func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
        return home is not None
    if name in ("to", "cpu", "cuda"):
        return _moved(name, args, kwargs)
    if name == "numpy" and home is not None:
        raise TypeError(f"can't convert {home} device type tensor to numpy")
    if name == "histc":
        args = (args[0].float(), *args[1:])  # a CPU has none for integers
    big = {place_of(each) for each in given if each.dim() or place_of(each) is not None}
    if len(big) > 1 and name not in _ACROSS and not _by_host(name, args):
        raise DeviceError(f"{name}: tensors on {big}, of shapes {[tuple(each.shape) for each in given]}")
    if kwargs.get("device") is not None:
        home = _gpu(kwargs["device"])
        kwargs |= {"device": "cpu"} if home is not None else {}
    found = func(*args, **kwargs)
    return tree_map(lambda each: _put(each, home), found) if home is not None else found


def _by_host(name: str, args: Sequence[Any]) -> bool:
    """Whether torch takes these tensors of several devices: indices on the host, or values, which are copied."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    indices = [each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor)]
    if any(place_of(each) not in (None, place_of(args[0])) for each in indices):
        return False
    copied = name == "__setitem__" and isinstance(args[2], torch.Tensor) and place_of(args[2]) != place_of(args[0])
    return not (copied and indices)


def _moved(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`to`, `cpu` or `cuda`."""
    tensor, rest = args[0], list(args[1:])
    to = [kwargs.pop("device", None), *(each for each in rest if isinstance(each, str | torch.device))]
    wanted = next((each for each in to if each is not None), {"cpu": "cpu", "cuda": "cuda"}.get(name))
    if wanted is not None and torch.device(wanted).type == "meta":
        return torch.Tensor.to(tensor, wanted)
    place = place_of(tensor) if wanted is None else _gpu(wanted)
    kwargs.pop("non_blocking", None)
    dtypes = [each for each in rest if isinstance(each, torch.dtype)]
    found: Any = torch.Tensor.to(tensor, *dtypes, **kwargs) if dtypes or kwargs else tensor  # pyright: ignore[reportCallIssue]
    if place != place_of(tensor):
        found = (found.clone() if found is tensor else found).as_subclass(torch.Tensor)
    return _put(found, place)


@contextmanager
def _chosen(name: str, value: Any) -> Iterator[None]:
    before = vars(_here).get(name)
    setattr(_here, name, value)
    try:
        yield
    finally:
        delattr(_here, name)
        if before is not None:
            setattr(_here, name, before)


def _properties(device: Any = "cuda") -> SimpleNamespace:
    number = (_gpu(device) or torch.device("cuda", 0)).index
    return SimpleNamespace(uuid=f"GPU-{number}", total_memory=80 << 30, major=9, minor=0, name="pretended")


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    assert place_of(tensor) is None, "only memory of the host can be pinned"
    pinned.append(tensor.nbytes)
    return tensor.clone()


def _in_this(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def pretending(thread: threading.Thread) -> None:
        with _Pretence():
            run(thread)

    return pretending


@contextmanager
def pretended_gpus(count: int) -> Iterator[None]:
    def set_device(device: Any) -> None:
        _here.gpu = (_gpu(device) or torch.device("cuda", 0)).index

    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: getattr(_here, "gpu", 0),
        "set_device": set_device,
        "device": lambda device: _chosen("gpu", (_gpu(device) or torch.device("cuda", 0)).index),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda device=None: Stream(name=stream_here()),
        "stream": lambda stream: _chosen("stream", stream.name),
        "synchronize": lambda device=None: None,
        "get_device_properties": _properties,
    }
    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        pinned.clear()
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pin))
        stack.enter_context(patch.object(threading.Thread, "run", _in_this(threading.Thread.run)))
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot change its class in place
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        stack.enter_context(_Pretence())
        yield
