"""What each learner rank sends if all send: from real DTensors, put together again and over real groups."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.errors import WeightsError
from asyncrl.learner.parallel.experts import spread
from asyncrl.learner.parallel.sharding import data_mesh, expert_data_mesh
from asyncrl.weights.broadcast import together
from asyncrl.weights.broadcast.landing import FlowLanding, write_flat
from asyncrl.weights.broadcast.protocol import fetch
from asyncrl.weights.broadcast.staging import Seat, Staging
from asyncrl.weights.fingerprint import bucket_fingerprint
from asyncrl.weights.flows import Flows, cut
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.publishing.gather import gather_into, plan
from asyncrl.weights.publishing.sharding import OwnShare
from asyncrl.weights.shares import Shares, divide, slices
from tests.forked import run_ranks

LAYOUTS = ("fsdp", "copies", "tensor", "experts")
SIZES = {"embed": (101, 6), "wide": (7, 50), "norm": (6,), "scale": (1,), "step": ()}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}
    return found | {"ids": torch.arange(9, dtype=torch.int64)}


def halves_by_columns(senders: int) -> tuple[Manifest, Shares]:
    """Tensors of two dimensions by columns, the others on all."""
    named = list(model().items())
    manifest = plan(named, torch.float32, 1 << 12)
    held = {}
    for name, tensor in named:
        whole = tuple((0, n) for n in tensor.shape)
        each = -(-tensor.shape[1] // senders) if tensor.ndim == 2 else 0
        held[name] = [
            (whole[0], (min(i * each, whole[1][1]), min((i + 1) * each, whole[1][1]))) if each else whole
            for i in range(senders)
        ]
    return manifest, divide(manifest, held, senders, 256)


class Loopback:
    """In the place of a `WeightGroup`, at both ends: what is to be received is there, piece by piece."""

    def __init__(self, bucket_bytes: list[torch.Tensor], piece: int) -> None:
        self._bytes, self._piece, self._done = torch.cat(bucket_bytes), piece, 0

    def pieces(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return buffer.split(self._piece) if len(buffer) else ()

    def broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self._bytes[self._done : self._done + len(buffer)])
        self._done += len(buffer)

    def wait(self, work: None) -> None: ...


@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("piece", [16, 48, 1 << 20])
def test_shares_by_columns_land_where_they_belong_in_pieces_of_any_size(senders, piece):
    manifest, shares = halves_by_columns(senders)
    expected, buffers = model(), manifest.allocate()
    views = manifest.views(buffers)
    wire = cut(shares, [{}], 1 << 20).to_wire()
    flows = Flows.from_wire(wire, Manifest.from_wire(manifest.to_wire()))
    for share, flow in zip(shares.of, flows.of, strict=True):
        assert flow.manifest == share.manifest, "it is sent as it was copied"
        parts = [(name, expected[name][slices(box)]) for name, box in share.boxes.items()]
        sent = share.manifest.allocate()
        prints = gather_into(share.manifest, parts, sent)
        group: Any = Loopback(sent, piece)
        landing = FlowLanding(flow.manifest.buckets, [group] * len(sent), "cpu")
        got = landing.receive({part: views[name][slices(box)] for part, (name, box) in flow.parts.items()})
        assert got == prints == [bucket_fingerprint(buffer) for buffer in sent]
    for name, tensor in expected.items():
        assert torch.equal(views[name], tensor), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_run_of_elements_is_written_to_a_box_that_does_not_lie_together(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    box = tuple(slice(a := data.draw(st.integers(0, n - 1)), data.draw(st.integers(a + 1, n))) for n in shape)
    target, expected = torch.zeros(shape), torch.zeros(shape)
    count = expected[box].numel()
    start = data.draw(st.integers(0, count - 1))
    values = torch.arange(1.0, data.draw(st.integers(1, count - start)) + 1)
    flat = expected[box].flatten().clone()
    flat[start : start + len(values)] = values
    expected[box] = flat.view(expected[box].shape)
    write_flat(target[box], start, values)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda wire: wire[1].pop(), "do not add up to the tensors"),
        (lambda wire: wire[1].append(wire[1][0]), "do not add up to the tensors"),
        (lambda wire: wire[0].__setitem__(0, [2]), "do not add up to the tensors"),
        (lambda wire: wire[0].__setitem__(0, [1, 1]), "are not ranks in order"),
        (lambda wire: wire[1][0][0].__setitem__(0, 7), "for lane 7 of 1"),
        (lambda wire: wire[1][0][0][1][0].__setitem__(2, 10**6), "has box"),
        (lambda wire: wire[1][0][0][1][0].__setitem__(0, 99), "names tensor 99"),
        (lambda wire: wire[1][0][0][1][0].pop(), "has box|zip"),
    ],
)
def test_shares_of_a_peer_that_do_not_put_the_tensors_together_are_refused(spoil, match):
    manifest, shares = halves_by_columns(2)
    wire = cut(shares, [{}], 1 << 20).to_wire()
    spoil(wire)
    seat = Seat(
        host="127.0.0.1", port=1, backend="gloo", epoch=1, rank=1, world=2, timeout_s=1.0, manifest=manifest.to_wire(),
        flows=wire,
    )  # fmt: skip
    with pytest.raises((WeightsError, ValueError), match=match):
        Staging().join(seat)


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


def _rank(rank: int, world: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    for layout in LAYOUTS:
        net = Net(layout)
        shard(net, layout, world)
        named = [(name, p.detach()) for name, p in net.named_parameters()]
        own = OwnShare.of(named, rank, world, torch.bfloat16, 64)
        parts = own.parts(named)
        buffers = own.share.manifest.allocate()
        gather_into(own.share.manifest, parts, buffers)
        views = own.share.manifest.views(buffers)
        save_file({name: view.clone() for name, view in views.items()}, Path(folder, f"{layout}-{rank}.safetensors"))
        if rank == 0:
            Path(folder, f"{layout}.json").write_text(json.dumps([share.boxes for share in own.shares.of]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
def test_what_the_ranks_of_any_layout_send_is_the_model(tmp_path):
    world = 4
    run_ranks(_rank, world, tmp_path, "tests.weights.chaos_processes")
    for layout in LAYOUTS:
        boxes = json.loads(Path(tmp_path, f"{layout}.json").read_text())
        expected = {name: p.detach().bfloat16() for name, p in Net(layout).named_parameters()}
        found = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
        for rank in range(world):
            parts = load_file(tmp_path / f"{layout}-{rank}.safetensors")
            for name, box in boxes[rank].items():
                assert found[name][slices(box)].isnan().all()  # once
                found[name][slices(box)] = parts[name]
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), layout
        assert all(boxes), f"{layout}: a rank sends nothing"


class Counting(TorchDispatchMode):
    """Bytes of memory that operations in it take, whether they give it back or not: no less than their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self._known = 0, {0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self._known |= {each.untyped_storage().data_ptr() for each in given}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self._known:
                self._known.add(each.untyped_storage().data_ptr())
                self.nbytes += each.untyped_storage().nbytes()
        return out


def test_a_rank_that_sends_its_share_takes_memory_for_two_copies_of_that_and_no_more():
    named = [(f"layers.{i}.w", torch.randn(64, 257)) for i in range(8)]
    whole = sum(tensor.nbytes for _, tensor in named)
    taken = {}
    for world in (1, 4):
        own = OwnShare.of(named, 0, world, torch.float32, 1 << 16)
        with Counting() as counted:
            snapshots = [own.share.manifest.allocate() for _ in range(2)]
            gather_into(own.share.manifest, own.parts(named), snapshots[0])
        taken[world] = counted.nbytes
    assert 2 * whole <= taken[1] <= 2.01 * whole
    assert taken[4] <= 2.01 * whole / 4


def test_ranks_that_wait_for_orders_get_a_tick_before_torch_logs_that_they_wait(monkeypatch):
    assert together._TICK_S < 5.0
    monkeypatch.setattr(together, "_TICK_S", 0.0)
    store = dist.HashStore()
    others = together.OtherSenders(store, 2, "p", 60.0)
    others.tick()
    assert not store.check(["order/1"]), "nobody waits before the first version, and orders are not kept for ever"
    others.take(0)
    others.tick()
    assert [fetch(store, f"order/{number}")["kind"] for number in (1, 2)] == ["take", "tick"]
    alone = together.OtherSenders(store, 1, "p", 60.0)
    alone.take(0)
    alone.tick()
    assert not store.check(["order/3"])
