from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.place import Place, memory_of, prepare_process


def test_ranks_of_one_machine_are_not_put_on_one_gpu():
    with pytest.raises(ConfigError, match="puts all 2 ranks of a machine on one GPU"):
        Place.of({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "cuda:0")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_by_its_setting(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"learner.device={device}, but torch sees no GPU"):
        Place.of({}, device)


def test_a_rank_beside_engines_takes_and_plans_with_its_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    taken: dict[torch.device, float] = {}
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda share, device: taken.update({device: share})
    )
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", taken.__getitem__)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9))
    device = torch.device("cuda", 1)
    place = Place(rank=1, world=2, device=device, restarted=False, run_id="run")
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", lambda settings: None)
    prepare_process(place, logging.WARNING, share=0.45)
    assert memory_of(device, 2) == 36 * 10**9
    prepare_process(place, logging.WARNING)
    assert memory_of(device, 2) == 80 * 10**9


@pytest.mark.parametrize(
    ("lends", "exported", "told"),
    [(False, "", ["expandable_segments:True"]), (True, "", []), (False, "max_split_size_mb:64", [])],
)
def test_memory_grows_in_place_unless_another_process_opens_it_or_the_user_says_how(
    lends: bool, exported: str, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, device: None)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", said.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", exported)
    place = Place(rank=0, world=1, device=torch.device("cuda", 0), restarted=False, run_id="run")
    prepare_process(place, logging.WARNING, lends_memory=lends)
    assert said == told


def test_float32_of_the_learner_is_no_tf32(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        prepare_process(Place.of({}, "cpu"), logging.WARNING)
        assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
