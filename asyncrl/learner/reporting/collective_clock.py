"""How long gathering weights and reducing gradients took: FSDP2's own collectives, each with a clock around it.

Of the sum over the copies of a model (HSDP) FSDP2 tells when it is there; it begins when its shards are reduced.

On a GPU the clock is two events on the stream that waits for the collective, read when the step is over: nothing waits
for them meanwhile. They measure from when a rank has come to a collective until it has what it asked for, so waiting
for a slower rank counts, and so does what is hidden behind computing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from asyncrl.checks.parallel import REPLICATE
from asyncrl.learner.roles import Roles

GATHER, REDUCE = "perf/gather_s", "perf/reduce_s"


class CollectiveClock:
    """Seconds of the collectives since they were last taken."""

    def __init__(self, device: torch.device, names: Iterable[str] = (GATHER, REDUCE)) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = dict.fromkeys(names, 0.0)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self.count(name, began)

    def now(self) -> float | torch.cuda.Event:
        """Of the stream that this is called on."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, name: str, began: float | torch.cuda.Event) -> None:
        """What has passed since `began`, which is a `now`."""
        ended = self.now()
        if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._open.append((name, began, ended))
        elif not isinstance(began, torch.cuda.Event) and not isinstance(ended, torch.cuda.Event):
            self._seconds[name] += ended - began

    def take(self) -> dict[str, float]:
        """Seconds by name, which begin at 0 again. On a GPU it waits for the collectives that were begun."""
        for name, began, ended in self._open:
            ended.synchronize()
            self._seconds[name] += began.elapsed_time(ended) / 1000
        self._open.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def watch(self, model: nn.Module) -> None:
        """Let the collectives of `model` go by this clock."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                with contextlib.suppress(ValueError):  # shards over several meshes have no one collective
                    module.set_custom_all_gather(TimedAllGather(self))
                    reduce_scatter = TimedReduceScatter(self)
                    module.set_custom_reduce_scatter(reduce_scatter)
                    if any(REPLICATE in names_of(parameter) for parameter in module.parameters()):
                        module.set_all_reduce_hook(reduce_scatter.added_up)


def clock_of(roles: Roles, world: int, device: torch.device) -> CollectiveClock:
    """Of all models' collectives; one rank has none, and its clock says nothing."""
    clock = CollectiveClock(device, names=(GATHER, REDUCE) if world > 1 else ())
    for model in roles.models() if world > 1 else ():
        clock.watch(model)
    return clock


def names_of(parameter: Tensor) -> tuple[str, ...]:
    """Of the dimensions of the ranks that share it."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


class TimedAllGather(DefaultAllGather):
    def __init__(self, clock: CollectiveClock) -> None:
        self._clock = clock

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self._clock.around(GATHER):
            return super().__call__(*given, **named)


class TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, clock: CollectiveClock) -> None:
        self._clock = clock
        self._reduced: float | torch.cuda.Event | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self._clock.around(REDUCE):
            work = super().__call__(*given, **named)
        self._reduced = self._clock.now()
        return work

    def added_up(self, _: Tensor) -> None:
        """Over the copies, too. Where a copy is one rank nothing is reduced before, and nobody tells the beginning."""
        if self._reduced is not None:
            self._clock.count(REDUCE, self._reduced)
        self._reduced = None
