"""What rank 0 gets of a model that is spread over ranks, while they train; and how much memory that takes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.learner.parallel.experts import spread
from asyncrl.learner.parallel.sharding import data_mesh, expert_data_mesh
from asyncrl.weights.publishing.gather import Gather
from asyncrl.weights.publishing.publisher import WeightPublisher
from asyncrl.weights.publishing.version import Version
from tests.forked import run_ranks
from tests.weights.versions import buckets_of, tensors_of, version_of

LAYOUTS = ("fsdp", "copies", "tensor", "experts")


class Net(nn.Module):
    """Odd sizes (uneven shards, some smaller than the world), a tie, and a buffer-like tensor that nobody cuts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 6)])
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        if layout == "experts":
            self.experts = nn.Module()
            self.experts.stack = nn.Parameter(torch.randn(6, 3, 2))  # 3 of them over 2 ranks: uneven as well
        if layout == "tensor":
            self.columns = nn.Linear(10, 9, bias=False)
            self.rows = nn.Linear(3, 11, bias=False)


def shard(net: Net, layout: str, world: int) -> None:
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    elif layout == "copies":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "experts":
        ranks = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "expert"))
        for experts in spread(net, ranks):
            fully_shard(experts, mesh=expert_data_mesh(ranks))
        mesh = data_mesh(ranks)
    else:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
        for module in [module for module in net.modules() if module._parameters]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                how = Shard(1) if module is net.columns else Shard(0) if module is net.rows else Replicate()
                part = nn.Parameter(distribute_tensor(parameter.data, both["tensor"], [how]))
                module._parameters[name] = part
        net.head.weight = net.embed.weight
        mesh = both["shard"]
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
def test_plain_tensors_are_cast_and_integers_are_not(wire_dtype):
    model = Net("fsdp")
    model.register_parameter("steps", nn.Parameter(torch.tensor([3, 2**40]), requires_grad=False))
    views = tensors_of(version_of(list(model.named_parameters()), dtype=wire_dtype, cap=64))
    for name, parameter in model.named_parameters():
        expected = parameter.to(wire_dtype) if parameter.is_floating_point() else parameter
        assert torch.equal(views[name], expected)


class KeepingSender:
    """Keeps the bytes of each version; serves newcomers when the test says that there are some."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.behind = False
        self.newcomers = threading.Event()

    def send(self, version: Version) -> None:
        self.behind = False
        if not self.newcomers.is_set():
            return  # nobody is there
        self.sent.append((version.policy_version, version.manifest.views(buckets_of(version))))

    def idle(self, newest: Version | None) -> None:
        if self.newcomers.is_set() and newest is not None and not self.sent:
            if newest.gone:
                self.behind = True
            else:
                self.send(newest)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _late_engines(model: nn.Module, reference: dict[str, torch.Tensor], rank: int) -> None:
    """All ranks wait for a batch when the first engine comes: it gets the version that was published before. So does
    its successor, while no batch can be generated without one (`max_staleness=0`)."""
    sender = KeepingSender() if rank == 0 else None
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=64, wait_s=120.0)
    publisher.publish(0, [(name, p.detach()) for name, p in model.named_parameters()])
    _until_served(publisher, sender, late_s=1.0)
    if sender is not None:
        assert [version for version, _ in sender.sent] == [0]
        sender.sent.clear()  # the only engine is killed, and another one comes
    _until_served(publisher, sender, late_s=0.0)
    if sender is not None:
        (version, tensors), *_ = sender.sent
        assert version == 0
        assert all(torch.equal(tensors[name], parameter) for name, parameter in reference.items())
    publisher.wait()
    dist.barrier()
    publisher.close()


def _until_served(publisher: WeightPublisher, sender: KeepingSender | None, late_s: float) -> None:
    """What ranks do while they wait for a batch, until an engine that comes late has its weights."""
    began, served = time.monotonic(), False
    while not served:
        if sender is not None and time.monotonic() - began >= late_s:
            sender.newcomers.set()
        if publisher.meets:
            publisher.serve()
        found = torch.tensor([float(sender is not None and bool(sender.sent))])
        dist.broadcast(found, 0)
        served = bool(found.item())
        assert time.monotonic() - began < 120
        time.sleep(0.05)


def _beside_training(model: nn.Module, reference: dict[str, torch.Tensor], rank: int) -> None:
    """Each rank gathers on one thread and reduces on another; the optimizer steps as soon as it may."""
    sender = KeepingSender() if rank == 0 else None
    if sender is not None:
        sender.newcomers.set()
    publisher = WeightPublisher(sender, wire_dtype=torch.float32, bucket_bytes=64, wait_s=120.0)
    optimizer, waited = torch.optim.SGD(model.parameters(), lr=1.0), list[float]()
    optimizer.register_step_pre_hook(lambda *_: waited.append(publisher.wait()))
    for version in range(8):
        publisher.publish(version, [(name, p.detach()) for name, p in model.named_parameters()])
        for _ in range(version):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert float(total.sum()) == 1000 * dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        if sender is not None:
            deadline = time.monotonic() + 120
            while len(sender.sent) <= version:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            sent_version, tensors = sender.sent[version]
            assert sent_version == version
            for name, parameter in reference.items():
                assert torch.equal(tensors[name], parameter), (version, name)
                parameter.add_(1.0)
    dist.barrier()
    publisher.close()


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of all storages that operations in it made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for each in plain((args, kwargs)):
            if each.untyped_storage().data_ptr() not in self._made:
                self._given.add(each.untyped_storage().data_ptr())
        out = func(*args, **(kwargs or {}))
        for each in plain(out):
            storage = each.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._given:
                self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for ref, nbytes in self._made.values() if not ref.expired()))
        return out


def plain(found: object) -> list[torch.Tensor]:
    """Tensors with memory of their own, as wrappers have none."""
    return [each for each in tree_leaves(found) if type(each) in (torch.Tensor, nn.Parameter)]


def _memory(model: nn.Module, rank: int) -> None:
    """One pass, counted: at most four buckets on any rank, whatever the layout."""
    cap = 4096
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    gather = Gather(named, 120.0)
    version = version_of(named, cap=cap, gather=gather)
    largest = max(bucket.nbytes for bucket in version.manifest.buckets)
    with LiveBytes() as counted:
        if rank == 0:
            with version.open() as buckets:
                for index in range(len(version.manifest.buckets)):
                    buckets.take(index)
            version.wait(to_write=True)
        elif gather.takes_part:
            gather.follow(version.manifest, dict(named))
    assert len(version.manifest.buckets) > 8
    assert counted.peak <= 4 * largest, (counted.peak, largest)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(12)])


def _rank(rank: int, world: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    for layout in LAYOUTS:
        net = Net(layout)
        reference = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        shard(net, layout, world)
        named = [(name, p.detach()) for name, p in net.named_parameters()]
        for wire_dtype in (torch.float32, torch.bfloat16):
            gather = Gather(named, 120.0)
            version = version_of(named, dtype=wire_dtype, cap=64, gather=gather)
            if rank == 0:
                for _ in range(2):  # a version is sent as often as it takes
                    views = tensors_of(version)
                    for name, parameter in reference.items():
                        assert torch.equal(views[name], parameter.to(wire_dtype)), (name, layout, wire_dtype)
                version.wait(to_write=True)
            elif gather.takes_part:
                gather.follow(version.manifest, dict(named))
        if layout in ("fsdp", "copies", "tensor"):
            _late_engines(net, reference, rank)
        if layout in ("fsdp", "copies"):
            _beside_training(net, reference, rank)
    deep = Deep()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in deep.layers:
        fully_shard(layer, mesh=mesh)
    _memory(deep, rank)
    deep = Deep()
    for layer in deep.layers:
        for name, parameter in list(layer.named_parameters()):
            part = distribute_tensor(parameter.data, mesh, [Shard(parameter.ndim - 1)])
            layer._parameters[name] = nn.Parameter(part)
    _memory(deep, rank)
    Path(folder, f"ok{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [4])
def test_shards_of_any_layout_gather_to_exactly_the_cast_full_tensors(tmp_path, world):
    run_ranks(_rank, world, tmp_path, "tests.weights.chaos_processes")
    assert all((tmp_path / f"ok{rank}").exists() for rank in range(world))


def test_one_rank_takes_no_memory_for_a_pass():
    deep = Deep()
    named = [(name, p.detach()) for name, p in deep.named_parameters()]
    version = version_of(named, cap=4096)
    with LiveBytes() as counted, version.open() as buckets:
        for index in range(len(version.manifest.buckets)):
            buckets.take(index)
    assert counted.peak == 0
