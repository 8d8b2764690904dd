"""What a receiver makes of the pieces of a plan's buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights.boxes import Box, slices, whole, write_flat
from asyncrl.weights.broadcast.receive import BucketReceiver
from asyncrl.weights.broadcast.staging import Seat, Staging
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.gather import manifest_of
from tests.weights.versions import fingerprints_of

SIZES = {"embed": (101, 6), "wide": (7, 50), "norm": (6,), "scale": (1,), "step": ()}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SIZES.items()}
    return found | {"ids": torch.arange(9, dtype=torch.int64)}


def columns(processes: int) -> list[dict[str, tuple[Box, ...]]]:
    """Of tensors of two dimensions each process wants some of the columns."""
    wanted: list[dict[str, tuple[Box, ...]]] = []
    for i in range(processes):
        found = {}
        for name, tensor in model().items():
            if tensor.ndim == 2:
                step = -(-tensor.shape[1] // processes)
                found[name] = (((0, tensor.shape[0]), (i * step, min((i + 1) * step, tensor.shape[1]))),)
        wanted.append(found)
    return wanted


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


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("piece", [16, 48, 1 << 20])
def test_parts_by_columns_land_where_they_belong_in_pieces_of_any_size(processes, piece):
    named = list(model().items())
    manifest = manifest_of(named, torch.float32, 1 << 12)
    wanted = columns(processes) if processes > 1 else [{}]
    wire = SendPlan.of(manifest, wanted, 256).to_wire()
    read = SendPlan.from_wire(wire, Manifest.from_wire(manifest.to_wire()), processes + 1)
    parts = [(part, dict(named)[name][slices(box)]) for part, (name, box) in read.parts.items()]
    sent = read.manifest.allocate()
    for name, view in read.manifest.views(sent).items():
        view.copy_(dict(parts)[name])
    prints = fingerprints_of(sent)
    for rank, want in enumerate(wanted, 1):
        places = manifest.views(manifest.allocate())
        lanes = {lane: ranks for lane, ranks in enumerate(read.lanes) if rank in ranks}
        of = {lane: [sent[i] for i, other in enumerate(read.bucket_lanes) if other == lane] for lane in lanes}
        groups: Any = {lane: Loopback(buffers, piece) for lane, buffers in of.items() if buffers}
        receiver = BucketReceiver(read, groups, "cpu")
        got = receiver.receive(lambda part, places=places: places[read.parts[part][0]][slices(read.parts[part][1])])
        assert [theirs or ours for theirs, ours in zip(got, prints, strict=True)] == prints
        for name, tensor in named:
            for box in want.get(name, (whole(tensor.shape),)):
                assert torch.equal(places[name][slices(box)], tensor[slices(box)]), name


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
        (lambda wire: wire[1][0].__setitem__(0, 7), "for lane 7 of"),
        (lambda wire: wire[1][0][1][0].__setitem__(2, 10**6), "has box"),
        (lambda wire: wire[1][0][1][0].__setitem__(0, 99), "part of tensor 99"),
        (lambda wire: wire[1][0][1][0].pop(), "has box|zip"),
    ],
)
def test_a_plan_of_a_peer_that_does_not_put_the_tensors_together_is_refused(spoil, match):
    manifest = manifest_of(list(model().items()), torch.float32, 1 << 12)
    wire = SendPlan.of(manifest, [{}, columns(2)[0]], 1 << 20).to_wire()
    spoil(wire)
    seat = Seat(
        host="127.0.0.1", port=1, backend="sockets", epoch=1, rank=1, world=3, timeout_s=1.0,
        manifest=manifest.to_wire(), plan=wire,
    )  # fmt: skip
    with pytest.raises((WeightsError, ValueError), match=match):
        Staging().join(seat)
