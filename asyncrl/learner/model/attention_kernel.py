"""Chooses the kernel of packed attention from the device, the dtype, the width of the heads and what is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.attention
from transformers import PretrainedConfig

log = logging.getLogger(__name__)

BLOCKS, FLASH, FLASH3, FLASH3_CACHED, FLEX = "blocks", "flash", "flash3", "flash3_cached", "flex"
FLASH_FROM, FLASH3_ON, WIDEST = (8, 0), 9, 256
"""Compute capabilities that FlashAttention-2 and -3 require, and the widest head that both support."""
FLASH3_MODULE = "flash_attn_interface"
"""Import name of FlashAttention-3's own wheel, which torch calls."""
FLASH3_REPOSITORY, FLASH3_VERSION = "kernels-community/flash-attn3", 1
"""Where the Hugging Face Hub has builds of it, for the package `kernels`."""


@dataclass(frozen=True, slots=True)
class There:
    """What is available to a rank for computing attention."""

    device: str
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the GPU."""
    flash3: bool = False
    """Whether FlashAttention-3's wheel is installed and this torch can call it."""
    cached: bool = False
    """Whether the package `kernels` has a build of it in its cache."""
    triton: bool = False
    failed: tuple[tuple[str, str], ...] = ()
    """Kernels that were tried and cannot be used, each with the reason."""

    @classmethod
    def of(cls, device: torch.device) -> There:
        if device.type != "cuda":
            return cls(device.type)
        capability = torch.cuda.get_device_capability(device)
        hopper = capability[0] == FLASH3_ON
        return cls(
            "cuda",
            capability,
            flash3=hopper and "FA3" in torch.nn.attention.list_flash_attention_impls() and _installed(FLASH3_MODULE),
            cached=hopper and cached_build() is not None,
            triton=_installed("triton"),
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    why: str

    @property
    def any_length(self) -> bool:
        """Whether rows of all lengths go to one call; otherwise rows of similar length go to one call each, padded."""
        return self.name != BLOCKS


_uncompiled: ContextVar[bool] = ContextVar("uncompiled", default=False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it float32 takes BLOCKS: compiling flex_attention for a few tokens takes every rank a minute."""
    before = _uncompiled.set(True)
    try:
        yield
    finally:
        _uncompiled.reset(before)


def compiles_nothing(dtype: torch.dtype) -> bool:
    """Whether `uncompiled` is in force for this dtype, for which the only other choice is flex_attention."""
    return _uncompiled.get() and dtype == torch.float32


def choose(there: There, dtype: torch.dtype, width: int) -> Kernel:
    """Choose the kernel for attention in `dtype` with heads of at most `width`."""
    blocks = "scaled_dot_product_attention on rows of similar length: "
    if there.device != "cuda":
        return Kernel(BLOCKS, f"{blocks}the device is {there.device}")
    failed = dict(there.failed)
    cause = _against_flash(there, dtype, width)
    if not cause:
        kernels = _flash_kernels(there)
        usable = [Kernel(name, why) for name, why in kernels.items() if name not in failed]
        if usable:
            return _with_failures(usable[0], failed)
        cause = "no flash kernel works here"
    if there.triton and there.capability >= FLASH_FROM and FLEX not in failed:
        return _with_failures(Kernel(FLEX, f"flex_attention, compiled: {cause}"), failed)
    return _with_failures(Kernel(BLOCKS, blocks + cause), failed)


def _against_flash(there: There, dtype: torch.dtype, width: int) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash kernels need half precision, and model.dtype is {str(dtype).removeprefix('torch.')}"
    if there.capability < FLASH_FROM:
        return f"flash kernels need compute capability 8.0, and this GPU has {_dotted(there)}"
    if width > WIDEST:
        return f"flash kernels support heads of up to {WIDEST}, and these have {width}"
    return ""


def _flash_kernels(there: There) -> dict[str, str]:
    """Those that are there, the fastest first, each with the reason to take it."""
    found, flash = {}, "FlashAttention-2 through torch's varlen_attn: "
    if there.capability[0] != FLASH3_ON:
        return {FLASH: f"{flash}compute capability {_dotted(there)}"}
    if there.flash3:
        found[FLASH3] = f"FlashAttention-3 through torch's varlen_attn: {FLASH3_MODULE} is installed"
    if there.cached:
        found[FLASH3_CACHED] = f"FlashAttention-3: {FLASH3_REPOSITORY} is in the cache of kernels"
    absent = f"neither {FLASH3_MODULE} is installed nor {FLASH3_REPOSITORY} in the cache of kernels"
    return found | {FLASH: flash + ("FlashAttention-3 does not work" if found else absent)}


def _with_failures(kernel: Kernel, failed: dict[str, str]) -> Kernel:
    said = "".join(f"; {name} is there and cannot be used ({why})" for name, why in failed.items())
    return Kernel(kernel.name, kernel.why + said)


def _dotted(there: There) -> str:
    return ".".join(map(str, there.capability))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@cache
def cached_build() -> Path | None:
    """Folder with the build of FlashAttention-3 for this torch, which `kernels.install_kernel` downloaded before.
    Nothing is downloaded here: which code runs is the user's decision, and a machine without a network must start."""
    if not _installed("kernels"):
        return None
    try:
        kernels = importlib.import_module("kernels")  # an optional package
        return Path(kernels.install_kernel(FLASH3_REPOSITORY, version=FLASH3_VERSION, local_files_only=True))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:  # TypeError: versions before 0.17
        log.debug("%s is not in the cache of kernels: %s", FLASH3_REPOSITORY, error)
        return None


def widest_head(text: PretrainedConfig) -> int:
    """Largest width of queries, keys and values, from the config of a decoder."""
    heads = getattr(text, "num_attention_heads", None) or 1
    told = [getattr(text, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    return max((width for width in told if width), default=getattr(text, "hidden_size", 0) // heads)
