"""`--dry-run` says whether a rank fits its GPU."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.cli.dry_run.command import plan_text
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.step import accumulation
from asyncrl.memory import fit as memory_fit
from asyncrl.memory.fit import fitting_lines, gpu_gb, refuse_unfit, taken
from asyncrl.memory.model_size import model_size, sizes_of, tensor_shapes
from asyncrl.memory.usage import size
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import learner_config

QWEN = {"7b": (3584, 18944, 28, 28, 4), "72b": (8192, 29568, 80, 64, 8)}
"""Of Qwen2.5: hidden, inner, layers, heads, key-value heads."""
VOCABULARY = 152064
ROOM = int(0.9 * 80e9)
SMALL = ("weights=files", "model.activation_checkpointing=true", "learner.max_tokens_per_microbatch=2048")


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "nvidia_smi", lambda: None)


def checkpoint(folder: Path, name: str) -> Path:
    """Everything of a checkpoint but its numbers."""
    hidden, inner, layers, heads, keys = QWEN[name]
    width = hidden // heads * keys
    each = {
        **{"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (width, hidden)},
        **{"self_attn.v_proj": (width, hidden), "self_attn.o_proj": (hidden, hidden)},
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)},
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
    }
    shapes = {f"model.layers.{i}.{part}.weight": shape for i in range(layers) for part, shape in each.items()}
    shapes |= {"model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden)}
    header = json.dumps({key: {"dtype": "BF16", "shape": list(shape)} for key, shape in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    config = {
        **{"model_type": "qwen2", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": VOCABULARY},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def planned(folder: Path, *settings: str) -> Config:
    files = (f"model.path={folder}", "data.path=rows.jsonl", "reward.function=mine.py:score")
    return with_dtypes(load_config([*files, "placement.gpus=96", *settings]), learner="cuda", engine="cuda")


def fit(config: Config) -> list[str]:
    return fitting_lines(config, sizes_of(config), "learner")


@pytest.mark.parametrize(
    ("name", "ranks", "fits"), [("7b", 8, True), ("72b", 64, True), ("72b", 8, False), ("7b", 1, False)]
)
def test_a_plan_says_whether_a_rank_fits(name: str, ranks: int, fits: bool, tmp_path: Path):
    """With settings that keep activations small."""
    config = planned(checkpoint(tmp_path, name), f"learner.ranks={ranks}", *SMALL)
    (line,) = fit(config)
    model = model_size(tmp_path)
    assert model is not None
    needed = taken(config, model, ROOM)
    assert size(needed) in line and (needed <= ROOM) == fits
    assert ("which fits" in line) == fits and ("Less takes: model.activation_checkpointing" in line) != fits


def test_the_plan_of_fine_tuning_says_so_too(tmp_path: Path):
    own = [f"model.path={checkpoint(tmp_path, '7b')}", "data.path=rows.jsonl", "learner.ranks=1"]
    config = learner_config(load_sft(own))
    (line,) = fit(with_dtypes(replace(config, placement=replace(config.placement, gpus=8)), learner="cuda"))
    assert "does not fit" in line


def test_nothing_is_said_of_a_learner_on_a_cpu_or_of_a_model_that_is_not_here(tmp_path: Path):
    assert not fit(planned(checkpoint(tmp_path, "7b"), "learner.device=cpu"))
    assert not fit(planned(tmp_path / "elsewhere"))


def test_gpus_that_are_here_are_asked_for_their_memory(monkeypatch: pytest.MonkeyPatch):
    assert gpu_gb() == 80
    told = "NVIDIA, of two names, 24576, 3, 550.1\nNVIDIA B, 81559, 3, 550.1\n"
    monkeypatch.setattr(memory_fit, "nvidia_smi", lambda: told)
    assert math.isclose(gpu_gb(), 24576 * 2**20 / 1e9)


def test_gradients_are_reduced_as_the_learner_will_decide():
    assert memory_fit.reduces_each is accumulation.reduces_each


def test_a_plan_reads_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, critic = tmp_path / "policy", tmp_path / "critic"
    for folder, name in ((policy, "72b"), (critic, "7b")):
        folder.mkdir()
        checkpoint(folder, name)
    config = planned(policy, "learner.ranks=8", "advantage=gae", f"critic.path={critic}")
    read = list[Path]()

    def shapes(file: Path) -> dict[str, list[int]]:
        read.append(file.parent)
        return tensor_shapes(file)

    monkeypatch.setattr("asyncrl.memory.model_size.tensor_shapes", shapes)
    said = plan_text(config, "learner", [])
    assert "which does not fit" in said and "of the critic" in said
    assert sorted(read) == [critic, policy]


def test_models_that_cannot_fit_are_refused_at_the_start(tmp_path: Path):
    folder = checkpoint(tmp_path, "72b")
    said = r"GPUs of 80 GB: a rank has .* alone take 1\d\d\.\d GiB.*Give more learner\.ranks, learner\.offload"
    with pytest.raises(ConfigError, match=said):
        refuse_unfit(planned(folder, "learner.device=cuda", "learner.ranks=8", *SMALL), "learner")
    (line,) = refuse_unfit(planned(folder, "learner.device=cuda", "learner.ranks=24", "weights=files"), "learner")
    assert "does not fit" in line and "an estimate, so the run starts" in line
    assert refuse_unfit(planned(folder, "learner.device=cuda", "learner.ranks=64", *SMALL), "learner") == []
    assert refuse_unfit(planned(folder, "learner.device=cpu", "learner.ranks=1"), "learner") == []
