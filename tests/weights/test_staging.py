from __future__ import annotations

import torch

from asyncrl.weights.broadcast.receive import BucketReceiver
from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.manifest import build_manifest
from asyncrl.weights.plan import SendPlan

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
    plan, groups = SendPlan.everything(MANIFEST, 2), {0: group}
    staging._groups = groups  # pyright: ignore[reportAttributeAccessIssue]
    staging._receiver = BucketReceiver(plan, groups, "cpu")  # pyright: ignore[reportArgumentType]
    staging._stage_as(plan, None)
    return staging, group


def feed(staging: Staging, group: FeedingGroup, number: int) -> None:
    group.payloads = version(number)
    staging.receive({"policy_version": number})


def same(tensors, number: int) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in MANIFEST.views(version(number)).items())


def test_what_an_engine_keeps_is_never_written_to_again_and_two_sets_are_enough():
    staging, group = make()
    feed(staging, group, 1)
    kept, places = None, set()
    for number in range(2, 8):
        offered = staging.staged()
        assert same(offered, number - 1)
        offered.kept = True
        places.add(offered["a"].data_ptr())
        feed(staging, group, number)
        assert same(offered, number - 1), "the engine serves from these"
        assert kept is None or offered["a"].data_ptr() != kept["a"].data_ptr()
        kept = offered
    assert len(places) == 2


def test_what_was_copied_is_received_into_again():
    staging, group = make()
    feed(staging, group, 1)
    first = staging.staged()
    feed(staging, group, 2)
    assert same(first, 2) and first["a"].data_ptr() == staging.staged()["a"].data_ptr()


def test_memory_of_a_bucket_is_taken_when_its_first_bytes_arrive():
    """Pinning a large model takes as long as a group waits to form."""
    staging, group = make()
    assert staging.nbytes == 0
    feed(staging, group, 1)
    assert staging.nbytes == MANIFEST.nbytes
