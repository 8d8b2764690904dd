"""Shows which process gets which GPU, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.checks.placement import named, placement_of, visible_gpus
from asyncrl.schema import Config


def gpus_to_plan(config: Config) -> Sequence[str]:
    """Return the GPUs of this machine, or as many as `placement.gpus` if that is more."""
    visible = visible_gpus() or ()
    return visible if config.placement.gpus <= len(visible) else tuple(map(str, range(config.placement.gpus)))


def kind_to_plan(config: Config, device: str) -> str:
    """Return `cuda` or `cpu`: on which a process with the setting `device` computes on the planned machine."""
    return "cuda" if device != "cpu" and gpus_to_plan(config) else "cpu"


def placement_lines(config: Config) -> list[str]:
    """Return a table of processes, their GPUs, and the share of each GPU's memory."""
    visible = gpus_to_plan(config)
    placement = placement_of(config, len(visible))
    placed = list(placement)
    if not placed:
        return ["no process gets a GPU: " + ("none is asked for" if visible else "there is none")]
    head = f"{placement.mode}, {config.placement.gpus or len(visible)} GPU(s)"
    rows = [
        (each.name, named(each.gpus, visible), f"{each.memory:.0%}" if each.memory else "the rest") for each in placed
    ]
    wide = max(len(name) for name, _, _ in rows)
    return [head, *(f"{name:<{wide}}  GPU {gpus:<8} {share} of its memory" for name, gpus, share in rows)]
