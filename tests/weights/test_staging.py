from __future__ import annotations

import pytest
import torch

from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.delta import encode
from asyncrl.weights.manifest import build_manifest

MANIFEST = build_manifest([("a", (40,), torch.float32), ("b", (8, 3), torch.float32)], cap_bytes=128)


class FeedingGroup:
    """Hands out what the test put in."""

    def __init__(self) -> None:
        self.payloads: list[torch.Tensor] = []

    def pieces(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (buffer,) if len(buffer) else ()

    def broadcast(self, buffer: torch.Tensor) -> None:
        buffer.copy_(self.payloads.pop(0))

    def wait(self, work: None) -> None: ...

    def abort(self) -> None: ...


def version(number: int) -> list[torch.Tensor]:
    """The buckets of a version; few of their numbers differ from those of another."""
    buffers = [buffer.clone() for buffer in MANIFEST.allocate()]
    for tensor in MANIFEST.views(buffers).values():
        tensor.view(-1)[3] = number
        tensor.view(-1)[4:] = 7.0
    return buffers


def make() -> tuple[Staging, FeedingGroup]:
    staging, group = Staging(), FeedingGroup()
    staging._manifest, staging._buffers, staging._groups = MANIFEST, MANIFEST.allocate(), [group]  # pyright: ignore[reportAttributeAccessIssue]
    staging._views = MANIFEST.views(staging._buffers)
    return staging, group


def feed(staging: Staging, group: FeedingGroup, number: int, base: int | None = None) -> None:
    group.payloads, event = version(number), {"policy_version": number}
    if base is not None:
        deltas = [encode(new, old, 4) for new, old in zip(version(number), version(base), strict=True)]
        group.payloads = [delta.payload for delta in deltas]
        event |= {"base": base, "delta": [delta.header() for delta in deltas]}
    staging.receive(event)


def same(tensors, number: int) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in MANIFEST.views(version(number)).items())


@pytest.mark.parametrize("delta", [False, True])
def test_what_an_engine_keeps_is_never_written_to_again_and_two_sets_are_enough(delta):
    staging, group = make()
    feed(staging, group, 1)
    kept, places = None, set()
    for number in range(2, 8):
        offered = staging.staged()
        assert same(offered, number - 1)
        offered.kept = True
        places.add(offered["a"].data_ptr())
        feed(staging, group, number, base=number - 1 if delta else None)
        assert same(offered, number - 1), "the engine serves from these"
        assert kept is None or offered["a"].data_ptr() != kept["a"].data_ptr()
        kept = offered
    assert len(places) == 2


@pytest.mark.parametrize("delta", [False, True])
def test_what_was_copied_is_received_into_again(delta):
    staging, group = make()
    feed(staging, group, 1)
    first = staging.staged()
    feed(staging, group, 2, base=1 if delta else None)
    assert same(first, 2) and first["a"].data_ptr() == staging.staged()["a"].data_ptr()


def test_a_delta_for_another_version_than_the_one_staged_whole_breaks_the_group():
    staging, group = make()
    feed(staging, group, 1)
    with pytest.raises(RuntimeError, match="received a delta for version 2, but version 1 is staged here"):
        feed(staging, group, 3, base=2)
    with pytest.raises(RuntimeError, match="but version None is staged here"):
        feed(staging, group, 2, base=1)
    feed(staging, group, 4)
    assert same(staging.staged(), 4)
