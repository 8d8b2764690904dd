from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray

from asyncrl.rollout.assigned import see_own_gpus


@pytest.mark.parametrize(
    ("assigned", "or_none", "seen"),
    [
        (["10", "9", "2"], False, "2,9,10"),
        ([3], True, "3"),
        (["GPU-b", "GPU-a"], False, "GPU-a,GPU-b"),
        ([], False, "0,1"),
        ([], True, ""),
    ],
)
def test_an_actor_sees_the_gpus_that_ray_assigned_to_it_whatever_ray_was_told(
    assigned: list[object], or_none: bool, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    see_own_gpus(or_none=or_none)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
