from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from asyncrl.cli import main as command
from asyncrl.cli import verify
from asyncrl.config import config_to_dict, load_config, to_yaml
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.weights.canary import HALF
from tests.engines.models import CONFIGS, SHAPE


@pytest.fixture(autouse=True)
def only_transformers(monkeypatch):
    """vLLM takes half a minute to start; what it does is tested in tests/vllm."""
    monkeypatch.setattr(verify, "installed_engines", lambda: iter(["transformers"]))


def save_model(folder) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).save_pretrained(folder)
    return str(folder)


def test_a_model_that_the_engine_serves_right_is_ok_in_both_dtypes(tmp_path, capsys):
    assert verify.main(save_model(tmp_path / "model"), ["seed=3"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers")]
    assert [row.split()[1] for row in rows] == ["float32", "bfloat16"]
    assert all(row.endswith("ok") for row in rows)
    assert float(rows[0].split()[2]) < 1e-4 < float(rows[1].split()[2])


def test_an_engine_that_keeps_one_old_tensor_is_found_and_named(tmp_path, capsys, monkeypatch):
    load = TransformersEngine.load_weights

    def forget_one(self, version, tensors):
        kept = {name: p.detach().clone() for name, p in self._runner.model.named_parameters()}
        name = "model.layers.1.mlp.down_proj.weight"
        load(self, version, {**tensors, name: kept[name] * 0.9})

    monkeypatch.setattr(TransformersEngine, "load_weights", forget_one)
    assert verify.main(save_model(tmp_path / "model"), []) == 1
    assert "float32" in capsys.readouterr().out.split("DIFFERS at probe")[0]


def test_two_layers_of_a_deep_model_that_changed_places_are_found_in_bfloat16(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=128, intermediate_size=384, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    load, other = TransformersEngine.load_weights, {"11": "12", "12": "11"}

    def exchange_two(self, version, tensors):
        moved = {re.sub(r"layers\.(1[12])\.", lambda m: f"layers.{other[m[1]]}.", k): t for k, t in tensors.items()}
        load(self, version, moved)

    assert verify.main(str(tmp_path / "model"), []) == 0
    monkeypatch.setattr(TransformersEngine, "load_weights", exchange_two)
    assert verify.main(str(tmp_path / "model"), []) == 1
    half = [line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers  bfloat16")]
    assert half[0].endswith("ok") and "DIFFERS at probe" in half[1]
    assert float(half[1].split()[3]) < HALF.mean  # else the bound of every model finds it, and this shows nothing


def save_mixture(folder) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SHAPE | {"vocab_size": 320, "hidden_size": 64, "head_dim": 32}, tie_word_embeddings=False, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_experts_that_rounding_chooses_are_no_difference_and_the_row_says_so(tmp_path, capsys):
    assert verify.main(save_mixture(tmp_path / "model"), []) == 0
    full, half = (line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers"))
    assert full.endswith("ok") and float(full.split()[2]) < 1e-4
    assert "within 0.75, 95% must be" in half
    assert float(half.split()[2]) > 0.2  # else no router was near a tie, and this shows nothing


def test_two_experts_that_changed_places_are_found_in_both_dtypes(tmp_path, capsys, monkeypatch):
    load = TransformersEngine.load_weights

    def exchange_two(self, version, tensors):
        others = [1, 0, *range(2, 8)]
        load(self, version, {k: t[others] if "layers.0.mlp.experts" in k else t for k, t in tensors.items()})

    monkeypatch.setattr(TransformersEngine, "load_weights", exchange_two)
    assert verify.main(save_mixture(tmp_path / "model"), []) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers")]
    assert len(rows) == 2 and all("DIFFERS at probe" in row for row in rows)


def test_an_engine_that_refuses_the_weights_fails_the_check_with_its_reason(tmp_path, capsys, monkeypatch):
    load = TransformersEngine.load_weights
    monkeypatch.setattr(
        TransformersEngine,
        "load_weights",
        lambda self, version, tensors: load(self, version, {k: v for k, v in tensors.items() if "norm" not in k}),
    )
    assert verify.main(save_model(tmp_path / "model"), []) == 1
    assert "failed: parameter 'model.layers.0" in capsys.readouterr().out


def test_a_run_is_verified_by_what_it_exported_and_says_so_when_there_is_nothing(tmp_path, capsys):
    model = save_model(tmp_path / "run" / "hf")
    config = load_config(["model.path=gone", "data.path=d.jsonl", "reward.function=r.py:f"])
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config_to_dict(config)))
    assert verify.main(str(tmp_path / "run"), []) == 0
    with pytest.raises(ConfigError, match=r"Leave out seed=3"):
        verify.main(str(tmp_path / "run"), ["seed=3"])
    (tmp_path / "run" / "hf").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="neither an exported model"):
        verify.main(str(tmp_path / "run"), [])
    assert model


def test_a_path_without_a_model_is_refused_by_the_command_line(tmp_path, capsys):
    assert command.main(["verify", str(tmp_path)]) == 2
    assert f"model.path={tmp_path} cannot be loaded" in capsys.readouterr().err
