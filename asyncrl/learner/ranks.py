"""Meeting points of the learner ranks."""

from __future__ import annotations

import torch.distributed as dist


def barrier() -> None:
    """Return when every rank is here; at once where there is only one. Bounded by the process group's timeout."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
