"""Measures how long gathering weights and reducing gradients takes, with a clock around each of FSDP2's collectives.

For the all-reduce over the copies of a model (HSDP), FSDP2 only reports the end; it starts when the shards are reduced.

On a GPU the clock is two events on the stream that waits for the collective, read after the step, so that nothing waits
for them earlier. They measure from a rank's arrival at a collective to its result. This includes waiting for a slower
rank, and time that is hidden behind computation.
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
    """Seconds spent in collectives since they were last taken."""

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
        """Current time; on a GPU an event on the current stream."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, name: str, began: float | torch.cuda.Event) -> None:
        """Add the time since `began`, which is the result of `now`."""
        ended = self.now()
        if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._open.append((name, began, ended))
        elif not isinstance(began, torch.cuda.Event) and not isinstance(ended, torch.cuda.Event):
            self._seconds[name] += ended - began

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. On a GPU it waits for the collectives that have started."""
        for name, began, ended in self._open:
            ended.synchronize()
            self._seconds[name] += began.elapsed_time(ended) / 1000
        self._open.clear()
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def watch(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                with contextlib.suppress(ValueError):  # modules sharded over several meshes have no single collective
                    module.set_custom_all_gather(TimedAllGather(self))
                    reduce_scatter = TimedReduceScatter(self)
                    module.set_custom_reduce_scatter(reduce_scatter)
                    if any(REPLICATE in names_of(parameter) for parameter in module.parameters()):
                        module.set_all_reduce_hook(reduce_scatter.added_up)


def clock_of(roles: Roles, world: int, device: torch.device) -> CollectiveClock:
    """A clock of all models' collectives; a single rank has none, and its clock reports nothing."""
    clock = CollectiveClock(device, names=(GATHER, REDUCE) if world > 1 else ())
    for model in roles.models() if world > 1 else ():
        clock.watch(model)
    return clock


def names_of(parameter: Tensor) -> tuple[str, ...]:
    """Names of the mesh dimensions over which it is shared."""
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
        """Hook after the all-reduce over the copies. If a copy is one rank, nothing was reduced before it, so its start
        is unknown and it is not counted."""
        if self._reduced is not None:
            self._clock.count(REDUCE, self._reduced)
        self._reduced = None
