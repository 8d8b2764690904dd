"""Chooses the kernel of packed attention from the device, the dtype, the width of the heads and what is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.attention
from transformers import PretrainedConfig

BLOCKS, FLASH, FLASH3 = "blocks", "flash", "flash3"
FLASH_FROM, FLASH3_ON, WIDEST = (8, 0), 9, 256
"""Compute capabilities that FlashAttention-2 and -3 require, and the widest head that both support."""
FLASH3_MODULE = "flash_attn_interface"
"""Import name of FlashAttention-3's own wheel, which torch calls."""
NOT_USED: list[str] = []
"""Why FlashAttention-3 could not be used although it is installed."""


@dataclass(frozen=True, slots=True)
class There:
    """What is available to a rank for computing attention."""

    device: str
    capability: tuple[int, int] = (0, 0)
    """Compute capability of the GPU."""
    flash3: bool = False
    """Whether FlashAttention-3 is installed and this torch can call it."""
    broken: str = ""
    """Why it could not be used nevertheless."""

    @classmethod
    def of(cls, device: torch.device) -> There:
        if device.type != "cuda":
            return cls(device.type)
        known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
        flash3 = "FA3" in known and importlib.util.find_spec(FLASH3_MODULE) is not None
        return cls("cuda", torch.cuda.get_device_capability(device), flash3, " ".join(NOT_USED))


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    why: str

    @property
    def any_length(self) -> bool:
        """Whether rows of all lengths go to one call; otherwise rows of similar length go to one call each, padded."""
        return self.name != BLOCKS


def choose(there: There, dtype: torch.dtype, width: int) -> Kernel:
    """Choose the kernel for attention in `dtype` with heads of at most `width`."""
    if there.device != "cuda":
        return Kernel(BLOCKS, f"scaled_dot_product_attention on rows of similar length: the device is {there.device}")
    at, said = ".".join(map(str, there.capability)), "scaled_dot_product_attention on rows of similar length: "
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return Kernel(BLOCKS, f"{said}flash kernels need half precision, and model.dtype is {name}")
    if there.capability < FLASH_FROM:
        return Kernel(BLOCKS, f"{said}flash kernels need compute capability 8.0, and this GPU has {at}")
    if width > WIDEST:
        return Kernel(BLOCKS, f"{said}flash kernels support heads of up to {WIDEST}, and these have {width}")
    if there.capability[0] == FLASH3_ON and there.flash3 and not there.broken:
        return Kernel(FLASH3, f"FlashAttention-3 through torch's varlen_attn: {FLASH3_MODULE} is installed")
    flash = "FlashAttention-2 through torch's varlen_attn"
    if there.capability[0] != FLASH3_ON:
        return Kernel(FLASH, f"{flash}: compute capability {at}")
    return Kernel(FLASH, f"{flash}: " + (there.broken or f"FlashAttention-3 ({FLASH3_MODULE}) is not installed"))


@cache
def kernel_of(device: torch.device, dtype: torch.dtype, width: int = 0) -> Kernel:
    """The kernel that a rank uses. Once FlashAttention-3 is chosen, torch uses it for the whole process."""
    found = choose(There.of(device), dtype, width)
    if found.name == FLASH3:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # built for another torch, or CUDA
            NOT_USED.append(f"FlashAttention-3 is installed and cannot be used ({error})")
            found = choose(There.of(device), dtype, width)
    return found


def widest_head(text: PretrainedConfig) -> int:
    """Largest width of queries, keys and values, from the config of a decoder."""
    heads = getattr(text, "num_attention_heads", None) or 1
    told = [getattr(text, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    return max((width for width in told if width), default=getattr(text, "hidden_size", 0) // heads)
