from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.publishing.filling import Filling
from asyncrl.weights.publishing.gather import gather_into, plan


def test_who_waits_for_bytes_goes_on_when_they_are_final_and_not_before():
    filling, seen = Filling(60.0), []

    def follow() -> None:
        for nbytes in (10, 20, None):
            filling.wait(nbytes)
            seen.append(nbytes)

    follower = threading.Thread(target=follow)
    follower.start()
    filling.reach(9)
    follower.join(0.1)
    assert seen == []
    filling.reach(25)
    follower.join(0.1)
    assert None not in seen, "the copy has not ended"
    filling.end()
    follower.join(30)
    assert seen == [10, 20, None]


def test_a_copy_that_failed_wakes_who_waits_with_an_error_even_for_bytes_that_came():
    filling = Filling(60.0)
    filling.reach(100)
    filling.wait(100)
    filling.end(failed=True)
    for nbytes in (100, 200, None):
        with pytest.raises(WeightsError, match="the copy out of the learner failed"):
            filling.wait(nbytes)


def test_a_copy_that_stands_still_is_given_up():
    filling = Filling(0.05)
    with pytest.raises(WeightsError, match="did not go on in time"):
        filling.wait(1)
    filling.end()
    assert filling.failed, "who waited has said so already"


class Watching(Filling):
    """Keeps what the buffers held at every step."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        super().__init__(1.0)
        self._buffers = buffers
        self.steps: list[torch.Tensor] = []

    def reach(self, nbytes: int) -> None:
        super().reach(nbytes)
        self.steps.append(torch.cat(self._buffers)[:nbytes].clone())


def test_what_a_copy_calls_final_does_not_change_any_more_and_is_everything_at_the_end():
    torch.manual_seed(0)
    tensors = [("layers.0.w", torch.randn(300_001)), ("layers.0.b", torch.randn(3)), ("layers.1.w", torch.randn(70, 9))]
    manifest = plan(tensors, torch.bfloat16, 1 << 18)
    buffers = [buffer.fill_(7) for buffer in manifest.allocate()]
    watching = Watching(buffers)
    gather_into(manifest, tensors, buffers, None, watching)
    whole = torch.cat(buffers)
    assert len(manifest.buckets) > 1 and len(watching.steps) > len(manifest.buckets)
    assert all(torch.equal(step, whole[: len(step)]) for step in watching.steps)
    assert len(watching.steps[-1]) == manifest.nbytes
