"""The clock around FSDP2's collectives: what it counts, and that it changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.reporting import collective_clock
from asyncrl.learner.reporting.collective_clock import GATHER, REDUCE, CollectiveClock, clock_of
from asyncrl.learner.roles import Roles
from tests.learner.feed import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def ranks():
    """Four of which there is one: what the others send is not looked at."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


# A collective takes a second, and what the copies of a model add up another one.
@pytest.mark.parametrize(("sizes", "reduce_s"), [((4,), 3.0), ((2, 2), 6.0)])
def test_every_gather_and_reduce_of_a_sharded_model_is_timed(
    sizes: tuple[int, ...], reduce_s: float, ranks: None, monkeypatch: pytest.MonkeyPatch
):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    hf = tiny_model("llama")
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    FSDP2(mesh).shard(model, torch.float32)
    roles = Roles(policy=model, optimizer=torch.optim.SGD(model.parameters()))
    clock = clock_of(roles, 2, CPU)
    ticks = iter(range(1000))
    monkeypatch.setattr(collective_clock.time, "perf_counter", lambda: float(next(ticks)))
    model.seen(Pack.of([np.arange(8, dtype=np.int32)], CPU)).sum().backward()
    # Two layers and the rest; the layers again in the backward, where the rest is whole still.
    assert clock.take() == {"perf/gather_s": 5.0, "perf/reduce_s": reduce_s}
    assert clock.take() == {GATHER: 0.0, REDUCE: 0.0}
    assert clock_of(roles, 1, CPU).take() == {}, "one rank meets nobody"


def test_on_a_gpu_events_are_read_when_the_step_is_over(monkeypatch: pytest.MonkeyPatch):
    calls = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.record, self.synchronize = (lambda: calls.append("record")), (lambda: calls.append("wait"))

        def elapsed_time(self, ended: Event) -> float:
            assert ended is not self
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = CollectiveClock(SimpleNamespace(type="cuda"))  # pyright: ignore[reportArgumentType]
    for name in (GATHER, GATHER, REDUCE):
        with clock.around(name):
            calls.append(name)
    assert calls == [each for name in (GATHER, GATHER, REDUCE) for each in ("record", name, "record")]
    assert clock.take() == {GATHER: 0.5, REDUCE: 0.25}
    assert calls[-3:] == ["wait"] * 3 and clock.take() == {GATHER: 0.0, REDUCE: 0.0}
