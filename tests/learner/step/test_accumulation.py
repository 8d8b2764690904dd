from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.memory_plan import held, reduces_each
from asyncrl.learner.model.attention import PACKED_ATTENTION
from asyncrl.learner.model.packed import set_gradient_sync
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.parallel.place import memory_of
from tests.learner.feed import tiny_model
from tests.learner.rank_process import whole

GPU = 80 * 10**9


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("billions", "ranks", "each"),
    [(0.5, 1, False), (1.7, 8, False), (4, 8, False), (4, 1, True), (7.6, 8, True), (32, 32, True), (72, 64, True)],
)
def test_the_whole_gradient_is_kept_only_where_there_is_room(billions: float, ranks: int, each: bool):
    count = int(billions * 1e9)
    shards = held([(count,)], ranks).total
    assert reduces_each("auto", shards=shards, trained=count, memory=GPU) == each
    assert reduces_each("each", shards=shards, trained=count, memory=GPU)
    assert not reduces_each("last", shards=shards, trained=count, memory=GPU)


def test_adapters_are_little_beside_a_frozen_base():
    base = held([(7 * 10**9,)], 1, width=2, trained=False).total
    adapters = held([(40 * 10**6,)], 1).total
    assert not reduces_each("auto", shards=base + adapters, trained=40 * 10**6, memory=GPU)


def test_a_rank_without_a_gpu_has_its_share_of_the_machine():
    assert 0 < memory_of(torch.device("cpu"), 2) <= memory_of(torch.device("cpu"), 1) // 2 + 1


@pytest.mark.parametrize("each", [False, True])
def test_between_micro_batches_the_gradient_is_whole_or_met(mesh: DeviceMesh, each: bool):
    hf = tiny_model(seed=0)
    hf.set_attn_implementation(PACKED_ATTENTION)
    model = PolicyModel(hf)
    FSDP2(mesh).shard(model, torch.bfloat16)
    model.reduce_each = each
    pack = Pack.of([np.arange(6, dtype=np.int32)], torch.device("cpu"))

    def backward(last: bool) -> None:
        set_gradient_sync(model, last)
        model(pack, 1.0)[0].sum().backward()

    backward(last=False)
    assert [parameter.grad is not None for parameter in model.parameters()] == [each] * len(list(model.parameters()))
    once = gradients(model) if each else []
    backward(last=True)
    assert {gradient.dtype for gradient in gradients(model)} == {torch.float32}
    if each:
        torch.testing.assert_close(gradients(model), [2 * before for before in once])


def gradients(model: PolicyModel) -> list[torch.Tensor]:
    return [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
