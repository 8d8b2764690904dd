"""A reference in bfloat16 takes 2 bytes per parameter, and its log-probs are those of float32 weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor

from asyncrl.learner.backends.factory import backend_of
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.policy import build_model, causal_lm
from asyncrl.learner.parallel.place import Place
from asyncrl.memory.model_size import model_size
from asyncrl.memory.usage import role_rows
from asyncrl.schema import AdvantageConfig, Config
from tests.learner.families import settings_for, siblings, tiny_family
from tests.learner.rank_process import on_ranks

CPU = torch.device("cpu")


def compared(rank: int, folder: Path, ranks: int, family: str, layout: dict[str, int]) -> None:
    config = settings_for(folder)
    config = replace(
        config,
        model=replace(config.model, dtype="bfloat16"),
        learner=replace(config.learner, ranks=ranks, **layout),
        advantage=AdvantageConfig(kl_coef=0.1),
    )
    backend = backend_of(config, Place(rank=rank, world=ranks, device=CPU, restarted=False, run_id="frozen"))
    frozen, averaged = (
        build_model(config, CPU, backend, frozen=kind == "frozen", averaged=kind == "averaged")
        for kind in ("frozen", "averaged")
    )
    assert frozen.layout is averaged.layout is (Layout.ROWS if family == "Qwen3-Next" else Layout.PACKED)
    bytes_of = [sum(map(local_bytes, model.parameters())) for model in (frozen, averaged)]
    assert 2 * bytes_of[0] == bytes_of[1]
    batch = siblings()
    with torch.no_grad():
        (mine, _), (theirs, _) = (model(batch, 1.0) for model in (frozen, averaged))
    assert torch.equal(mine, theirs) and mine.count_nonzero() > 0
    buffers = zip(frozen.named_buffers(), averaged.named_buffers(), strict=True)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for (_, one), (_, other) in buffers)
    assert not any(parameter.requires_grad for model in (frozen, averaged) for parameter in model.parameters())
    as_planned(config, folder, ranks, bytes_of[0])


def as_planned(config: Config, folder: Path, ranks: int, held: int) -> None:
    sizes = model_size(folder)
    assert sizes is not None
    ((planned, said),) = role_rows(config, sizes)
    assert said == "weights of the reference"
    assert planned == pytest.approx(held, rel=0.1 if ranks > 1 else 1e-9)


def local_bytes(parameter: torch.nn.Parameter) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


@pytest.mark.parametrize("family", ["DeepSeek-V3", "GLM-4-MoE", "Qwen3-Next", "Mamba 2"])
def test_a_rank_that_loads_a_model_and_one_that_builds_it_have_the_same_dtypes(family: str, tmp_path: Path):
    tiny_family(family).save_pretrained(tmp_path)
    load, build = causal_lm(settings_for(tmp_path).model, "model.path", torch.bfloat16)
    loaded, built = (
        {name: (tensor.dtype, tensor.shape) for name, tensor in (*hf.named_parameters(), *hf.named_buffers())}
        for hf in (load(), build())
    )
    assert loaded == built
    assert {dtype for dtype, _ in loaded.values()} <= {torch.bfloat16, torch.float32, torch.int64}


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3-Next"])
def test_on_one_rank(family: str, tmp_path: Path):
    tiny_family(family).save_pretrained(tmp_path)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        compared(0, tmp_path, 1, family, {})
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("Qwen3", {"tensor_parallel": 2}), ("Qwen3-MoE", {"expert_parallel": 2})),
        *(("DeepSeek-V3", {}), ("Qwen3-Next", {}), ("Gemma 3 (text)", {"sequence_parallel": 2})),
    ],
    ids=str,
)
def test_on_two_ranks(family: str, layout: dict[str, int], tmp_path: Path):
    tiny_family(family).save_pretrained(tmp_path)
    on_ranks(compared, 2, tmp_path, tmp_path, 2, family, layout)
