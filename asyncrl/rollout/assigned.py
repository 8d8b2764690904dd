"""The GPUs that a Ray actor sees."""

from __future__ import annotations

import os

import ray

from asyncrl.checks.placement import VISIBLE


def see_own_gpus(*, or_none: bool = False) -> None:
    """Let this process see the GPUs that Ray assigned to its actor, in order. Call it before torch is imported.

    Ray does so itself, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set, which other frameworks ask for: then
    all engines of a machine would meet on its first GPU.

    Args:
        or_none: see no GPU if none was assigned; newer versions of Ray then leave all of them visible.
    """
    own = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if own or or_none:
        os.environ[VISIBLE] = ",".join(sorted(map(str, own), key=lambda name: (len(name), name)))
