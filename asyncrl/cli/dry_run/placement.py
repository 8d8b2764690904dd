"""Which process gets which GPU, as `--dry-run` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.checks.placement import named, placement_of, visible_gpus
from asyncrl.schema import Config


def gpus_to_plan(config: Config) -> Sequence[str]:
    """Those that are here, or as many as `placement.gpus` says are elsewhere."""
    visible = visible_gpus() or ()
    return visible if config.placement.gpus <= len(visible) else tuple(map(str, range(config.placement.gpus)))


def kind_to_plan(config: Config, device: str) -> str:
    """`cuda` or `cpu`: what a process of the setting `device` computes on there."""
    return "cuda" if device != "cpu" and gpus_to_plan(config) else "cpu"


def placement_lines(config: Config) -> list[str]:
    """A table of process, GPUs, and how much of the memory of each."""
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
