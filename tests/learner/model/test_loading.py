"""Only rank 0 reads a checkpoint; the others hold, bit for bit, the shards that they would have cut out of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.critic import build_critic
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.policy import build_model
from asyncrl.schema import Config, ModelConfig
from tests.learner.feed import tiny_checkpoint
from tests.learner.rank_process import on_ranks, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CPU = torch.device("cpu")
KINDS = {
    "policy": (ModelConfig(), build_model),
    "half": (ModelConfig(dtype="bfloat16"), build_model),
    "adapters": (ModelConfig(lora_rank=2), build_model),
    "critic": (ModelConfig(), build_critic),
}


def config_of(kind: str, path: Path) -> Config:
    model, _ = KINDS[kind]
    return Config(model=ModelConfig(path=str(path), dtype=model.dtype, lora_rank=model.lora_rank))


def tensors_of(model: PackedModel) -> dict[str, torch.Tensor]:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(tensor).contiguous() for name, tensor in everything}


def build_on_two_ranks(folder: Path) -> None:
    on_ranks(_rank, 2, folder, folder)


def _rank(rank: int, folder: Path) -> None:
    """Rank 1 has a folder without weights."""
    backend = FSDP2(init_device_mesh("cpu", (2,)))
    for kind, (_, build) in KINDS.items():
        try:
            model = build(config_of(kind, folder / f"model-{rank}"), CPU, backend)
        except ConfigError as error:
            (folder / f"{kind}-{rank}.txt").write_text(str(error))
        else:
            save_file(tensors_of(model), folder / f"{kind}-{rank}.safetensors")


def test_a_rank_without_weights_gets_those_of_rank_0_bit_for_bit(tmp_path: Path):
    tiny_checkpoint(tmp_path / "model-0")
    (tmp_path / "model-1").mkdir()
    shutil.copy(tmp_path / "model-0" / "config.json", tmp_path / "model-1")
    build_on_two_ranks(tmp_path)
    for kind, (_, build) in KINDS.items():
        alone = tensors_of(build(config_of(kind if kind != "half" else "policy", tmp_path / "model-0"), CPU, None))
        for rank in range(2):
            found = load_file(tmp_path / f"{kind}-{rank}.safetensors")
            assert found.keys() == alone.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in alone.items()), (kind, rank)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_file_of_weights_that_was_cut_off_is_refused_like_a_missing_one(tmp_path: Path, kind: str):
    tiny_checkpoint(tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model cannot be loaded as a "):
        KINDS[kind][1](config_of(kind, tmp_path / "model"), CPU, None)


def test_what_rank_0_cannot_load_is_refused_on_every_rank(tmp_path: Path):
    tiny_checkpoint(tmp_path / "model-1")
    (tmp_path / "model-0").mkdir()
    shutil.copy(tmp_path / "model-1" / "config.json", tmp_path / "model-0")
    build_on_two_ranks(tmp_path)
    for kind in KINDS:
        for rank in range(2):
            assert "model-0" in (tmp_path / f"{kind}-{rank}.txt").read_text()
