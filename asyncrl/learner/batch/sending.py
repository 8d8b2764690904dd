"""From the host to the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

HOST = torch.device("cpu")


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, of the host, on `device`, without waiting for what that was told before.

    From memory that is pinned, which alone a GPU copies beside its work: of other memory the host waits.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
