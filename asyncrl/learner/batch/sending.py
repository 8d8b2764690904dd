"""Copies tensors from the host to the compute device."""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor `tensor` to `device` without waiting for the work queued there.

    The copy is made from pinned memory: only this is copied in parallel to the GPU's work; for other memory the host
    waits.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
