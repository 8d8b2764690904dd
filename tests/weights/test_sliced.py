"""Which part of a tensor a loader reads, and tensors of which only that part exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.boxes import slices, whole
from asyncrl.weights.sliced import NotTheSameError, box_of_view, find_wanted, sliced

Read = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (6, 8, 5)
VIEWS: dict[str, tuple[Read, tuple[Any, ...] | None]] = {
    "narrow": (lambda t: t.narrow(1, 2, 4), ((0, 6), (2, 6), (0, 5))),
    "chunk": (lambda t: t.chunk(2, dim=1)[1].narrow(1, 1, 2), ((0, 6), (5, 7), (0, 5))),
    "split": (lambda t: t.split([2, 4])[1], ((2, 6), (0, 8), (0, 5))),
    "an expert": (lambda t: t[3], ((3, 4), (0, 8), (0, 5))),
    "an expert's columns": (lambda t: t[3].narrow(1, 1, 3), ((3, 4), (0, 8), (1, 4))),
    "slices": (lambda t: t[1:4, :, 2:], ((1, 4), (0, 8), (2, 5))),
    "transposed": (lambda t: t.transpose(-1, -2).narrow(1, 0, 2).data, ((0, 6), (0, 8), (0, 2))),
    "one by one": (lambda t: t.unbind(0)[5].t()[4], ((5, 6), (0, 8), (4, 5))),
    "permuted": (lambda t: t.permute(2, 0, 1).detach()[1:2].squeeze(0), ((0, 6), (0, 8), (1, 2))),
    "iterated": (lambda t: list(t)[2].unsqueeze(0), ((2, 3), (0, 8), (0, 5))),
    "all of it": (lambda t: t.data, whole(SHAPE)),
    "put together": (lambda t: t.flatten()[3:20], None),
    "copied before": (lambda t: t.contiguous().narrow(0, 0, 2), None),
    "cast": (lambda t: t.to(torch.float64)[:2], None),
    "changed": (lambda t: t.mul(2)[:2], None),
    "every other": (lambda t: t[:, ::2], None),
    "turned round": (lambda t: torch.flip(t, (0,))[:2], None),
}  # fmt: skip


def loader(read: Read, into: dict[str, torch.Tensor]) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            assert tensor.shape == SHAPE and tensor.dtype == torch.float32 and len(tensor.shape) == tensor.ndim == 3
            part = read(tensor)
            target = into.setdefault(name, torch.zeros(part.shape, dtype=part.dtype, device=into["device"].device))
            target.data.copy_(part)

    return load


@pytest.mark.parametrize("how", VIEWS)
def test_a_loader_gets_from_its_part_what_it_gets_from_the_whole(how):
    read, box = VIEWS[how]
    meta = {"device": torch.zeros(0, device="meta")}
    wanted = find_wanted(loader(read, meta), {"w": torch.empty(SHAPE, device="meta")})
    assert wanted == {"w": (box or whole(SHAPE),)}
    tensor = torch.randn(SHAPE)
    held = {"w": {box: tensor[slices(box)].clone() for box in wanted["w"]}}
    into = {"device": torch.zeros(0)}
    loader(read, into)(list(sliced({"w": tensor.to("meta")}, held).items()))
    assert torch.equal(into["w"], read(tensor))


def test_parts_of_one_tensor_are_noted_apart_and_what_is_not_read_is_not_wanted():
    def load(tensors):
        for name, tensor in tensors:
            if name == "experts":
                for expert in range(6):
                    gate, up = tensor[expert].chunk(2, dim=0)
                    torch.empty(2, 5, device="meta").copy_(gate.narrow(0, 2, 2))
                    torch.empty(2, 5, device="meta").copy_(up.narrow(0, 2, 2))

    wanted = find_wanted(load, {"experts": torch.empty(SHAPE), "head": torch.empty(3)})
    assert wanted == {"experts": (((0, 6), (2, 4), (0, 5)), ((0, 6), (6, 8), (0, 5))), "head": ()}


def test_recording_writes_nothing():
    target = torch.ones(6)
    wanted = find_wanted(lambda tensors: target.copy_(dict(tensors)["w"][:6]), {"w": torch.empty(12)})
    assert wanted == {"w": (((0, 6),),)} and torch.equal(target, torch.ones(6))


@pytest.mark.parametrize(
    ("read", "match"),
    [
        (lambda t: t.narrow(0, 1, 3), r"reads \(\(1, 4\), \(0, 8\), \(0, 5\)\) of 'w'"),
        (lambda t: t.clone(), "calls clone with 'w'"),
        (lambda t: t + 1, "with 'w', which it did not"),
    ],
)
def test_a_loader_that_reads_what_it_did_not_before_is_an_error_and_gets_no_values(read, match):
    parts = sliced({"w": torch.empty(SHAPE, device="meta")}, {"w": {((0, 2), (0, 8), (0, 5)): torch.zeros(2, 8, 5)}})
    with pytest.raises(NotTheSameError, match=match):
        torch.zeros(read(torch.empty(SHAPE)).shape).copy_(read(parts["w"]))


def test_a_loader_that_needs_values_to_know_what_to_do_cannot_be_asked():
    with pytest.raises((RuntimeError, NotImplementedError)):
        find_wanted(lambda tensors: tensors[0][1].sum().item(), {"w": torch.empty(4)})


OPS: dict[str, Callable[[torch.Tensor, int, int, int], torch.Tensor]] = {
    "narrow": lambda t, dim, start, size: t.narrow(dim, start, size),
    "select": lambda t, dim, start, size: t.select(dim, start),
    "transpose": lambda t, dim, start, size: t.transpose(dim, -1),
    "flatten": lambda t, dim, start, size: t.flatten() if t.is_contiguous() else t,
    "unsqueeze": lambda t, dim, start, size: t.unsqueeze(dim),
    "step": lambda t, dim, start, size: t[::2],
}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_the_box_of_any_view_is_where_its_elements_are(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    view = torch.empty(shape, device="meta")
    numbers = torch.arange(view.numel()).view(shape)
    for _ in range(data.draw(st.integers(0, 4)) if shape else 0):
        if view.ndim:
            dim = data.draw(st.integers(0, view.ndim - 1))
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            size = data.draw(st.integers(1, view.shape[dim] - start))
            op = OPS[data.draw(st.sampled_from(sorted(OPS)))]
            view, numbers = op(view, dim, start, size), op(numbers, dim, start, size)
    box = box_of_view(shape, view)
    if box is not None:
        expected = torch.arange(torch.Size(shape).numel()).view(shape)[slices(box)]
        assert sorted(expected.flatten().tolist()) == sorted(numbers.flatten().tolist())
