from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncrl.learner.publishing.holding import hold_back
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.publishing import gather, snapshot
from asyncrl.weights.publishing.filling import Filling
from asyncrl.weights.publishing.gather import gather_into, plan
from asyncrl.weights.publishing.snapshot import BackgroundPublisher, Snapshot
from tests.forked import run_ranks


class Net(nn.Module):
    """Odd sizes (uneven shards, one smaller than the world), a tie, an integer tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6)])
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def gathered(model: nn.Module, wire_dtype: torch.dtype, cap: int, rank: int) -> dict[str, torch.Tensor]:
    named = list(model.named_parameters())
    manifest = plan(named, wire_dtype, cap)
    buffers = manifest.allocate() if rank == 0 else None
    gather_into(manifest, named, buffers)
    return manifest.views(buffers) if buffers is not None else {}


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_plain_tensors_are_cast_and_integers_are_not(wire_dtype):
    model = Net()
    model.register_parameter("steps", nn.Parameter(torch.tensor([3, 2**40]), requires_grad=False))
    views = gathered(model, wire_dtype, 64, rank=0)
    for name, parameter in model.named_parameters():
        expected = parameter.to(wire_dtype) if parameter.is_floating_point() else parameter
        assert torch.equal(views[name], expected)


class CountingFilling(Filling):
    def __init__(self) -> None:
        super().__init__(1.0)
        self.steps: list[int] = []

    def reach(self, nbytes: int) -> None:
        self.steps.append(nbytes)
        super().reach(nbytes)


@pytest.mark.parametrize("sizes", [[1000] * 200, [7, 0, 300_000, 3, 70_001]])
def test_small_tensors_are_copied_many_at_a_time_and_large_ones_in_blocks_with_the_same_bytes_and_fingerprint(sizes):
    named = [(f"w{i}", torch.randn(size)) for i, size in enumerate(sizes)]
    manifest, filling = plan(named, torch.float32, 1 << 30), CountingFilling()
    buffers = manifest.allocate()
    assert gather_into(manifest, named, buffers, filling=filling) == [bucket_fingerprint(buffers[0])]
    assert all(torch.equal(manifest.views(buffers)[name], tensor) for name, tensor in named)
    assert filling.steps == sorted(filling.steps) and filling.steps[-1] == manifest.nbytes
    assert len(filling.steps) <= manifest.nbytes // gather._BLOCK + 3


class KeepingSender:
    """Keeps what it is given to send as it was, piece by piece, the moment the copy called it final."""

    keeps_previous, sends_buckets = False, True

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, torch.Tensor]]] = []

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        kept, done = [], 0
        for buffer in snapshot.buffers:
            pieces = []
            for piece in buffer.split(16):
                done += len(piece)
                snapshot.filling.wait(done)
                pieces.append(piece.clone())
            kept.append(torch.cat(pieces))
        self.sent.append((snapshot.policy_version, snapshot.manifest.views(kept)))

    def idle(self, newest: Snapshot | None) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def _beside_training(model: nn.Module, reference: dict[str, torch.Tensor], rank: int) -> None:
    """Each rank gathers on one thread and reduces on another; the optimizer steps as soon as it may, in parts."""
    sender = KeepingSender() if rank == 0 else None
    publisher = BackgroundPublisher(sender, wire_dtype=torch.float32, bucket_bytes=64, wait_s=300.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hold_back(optimizer, publisher)
    snapshot._LEAST_PART = 1
    for version in range(12):
        publisher.publish(version, model.named_parameters())
        for _ in range(version):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert float(total.sum()) == 1000 * dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        if sender is not None:
            deadline = time.monotonic() + 300
            while len(sender.sent) <= version:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            sent_version, tensors = sender.sent[-1]
            assert sent_version == version
            for name, parameter in reference.items():
                assert torch.equal(tensors[name], parameter), (version, name)
                parameter.add_(1.0)
    publisher.close()


def _rank(rank: int, world: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    # Four ranks have two copies of the model, the others one.
    sizes = (2, world // 2) if world == 4 else (world,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model = Net()
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for wire_dtype in (torch.float32, torch.bfloat16):
        for cap in (64, 1 << 20):
            views = gathered(model, wire_dtype, cap, rank)
            if rank == 0:
                for name, parameter in reference.items():
                    assert torch.equal(views[name], parameter.to(wire_dtype)), (name, wire_dtype, cap)
    _beside_training(model, reference, rank)
    if rank == 0:
        Path(folder, "ok").touch()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [3, 4])
def test_fsdp_shards_gather_to_exactly_the_cast_full_tensors(tmp_path, world):
    run_ranks(_rank, world, tmp_path, "tests.weights.chaos_processes")
    assert (tmp_path / "ok").exists()
