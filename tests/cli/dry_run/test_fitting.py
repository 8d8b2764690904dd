"""`--dry-run` says whether a rank fits its GPU, and which layout would fit."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.rules.whole import problems_of_rules
from asyncrl.cli.dry_run import fitting
from asyncrl.cli.dry_run.command import plan_text
from asyncrl.cli.dry_run.fitting import candidates, changed, fitting_lines, gpu_gb, taken
from asyncrl.cli.dry_run.memory import size
from asyncrl.cli.dry_run.model_size import model_size, sizes_of, tensor_shapes
from asyncrl.config import load_config
from asyncrl.learner.step import accumulation
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import learner_config

QWEN = {"7b": (3584, 18944, 28, 28, 4), "72b": (8192, 29568, 80, 64, 8)}
"""Of Qwen2.5: hidden, inner, layers, heads, key-value heads."""
VOCABULARY = 152064
ROOM = int(0.9 * 80e9)


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "smi_says", lambda: None)


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


def apply(config: Config, said: str) -> Config:
    """The settings that a line names."""
    changes: dict[str, Any] = {}
    for key, value in re.findall(r"((?:model|learner|weights)\.\w+)=(\w+)", said):
        changes[key] = int(value) if value.isdecimal() else value == "true" if value in ("true", "false") else value
    found = changed(config, changes)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "ranks"), [("7b", 8), ("72b", 64), ("72b", 8), ("7b", 1)])
def test_what_does_not_fit_is_said_with_the_first_layout_that_does(name: str, ranks: int, tmp_path: Path):
    config = planned(checkpoint(tmp_path, name), f"learner.ranks={ranks}")
    (line,) = fit(config)
    model = model_size(tmp_path)
    assert model is not None
    assert size(taken(config, model, "learner", ROOM)) in line and "does not fit" in line
    said = line.partition("With ")[2]
    fits = apply(config, said)
    assert taken(fits, model, "learner", ROOM) <= ROOM
    assert size(taken(fits, model, "learner", ROOM)) in said
    tried = [changed(config, changes) for changes in candidates(config)]
    before = tried[: tried.index(fits)]
    assert all(taken(each, model, "learner", ROOM) > ROOM for each in before if each is not None)
    assert fit(fits) == [line for line in fit(fits) if "which fits" in line]


@pytest.mark.parametrize("ranks", [8, 1])
def test_fine_tuning_is_told_a_layout_that_it_accepts(ranks: int, tmp_path: Path):
    own = [f"model.path={checkpoint(tmp_path, '7b')}", "data.path=rows.jsonl", f"learner.ranks={ranks}"]
    budget = "learner.max_tokens_per_microbatch=65536"
    config = learner_config(load_sft([*own, budget]))
    config = with_dtypes(replace(config, placement=replace(config.placement, gpus=8)), learner="cuda")
    (line,) = fit(config)
    _, found, said = line.partition("which does not fit. With ")
    changes = re.findall(r"[a-z]+\.\w+=\w+", said)
    assert found and changes
    load_sft([*own, budget, *changes])


def test_a_model_that_no_layout_of_its_ranks_holds_is_said_to_be_too_large(tmp_path: Path):
    (line,) = fit(planned(checkpoint(tmp_path, "72b"), "learner.ranks=1"))
    assert "and no layout of 1 rank" in line


def test_the_copies_that_rank_zero_sends_count(tmp_path: Path):
    config = planned(checkpoint(tmp_path, "72b"), "learner.ranks=64", "model.activation_checkpointing=true")
    (line,) = fit(config)
    assert line.partition("With ")[2].startswith("weights.senders=all ")


def test_nothing_is_said_of_a_learner_on_a_cpu_or_of_a_model_that_is_not_here(tmp_path: Path):
    assert not fit(planned(checkpoint(tmp_path, "7b"), "learner.device=cpu"))
    assert not fit(planned(tmp_path / "elsewhere"))


def test_gpus_that_are_here_are_asked_for_their_memory(monkeypatch: pytest.MonkeyPatch):
    assert gpu_gb() == 80
    told = "NVIDIA, of two names, 24576, 3, 550.1\nNVIDIA B, 81559, 3, 550.1\n"
    monkeypatch.setattr(fitting, "smi_says", lambda: told)
    assert math.isclose(gpu_gb(), 24576 * 2**20 / 1e9)


def test_gradients_are_reduced_as_the_learner_will_decide():
    assert fitting.reduces_each is accumulation.reduces_each


def test_a_layout_that_a_start_refuses_is_not_proposed(tmp_path: Path):
    folder = checkpoint(tmp_path, "7b")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 18880}))  # 4 * 147.5 blocks
    for optimizer, allowed in (("adamw", True), ("adamw_8bit", False)):
        config = planned(folder, "learner.ranks=8", f"learner.optimizer={optimizer}")
        assert (changed(config, {"learner.tensor_parallel": 4}) is not None) == allowed, optimizer


def test_a_plan_reads_each_model_once_and_applies_the_rules_once_to_what_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It did both for every layout that it tried."""
    policy, critic = tmp_path / "policy", tmp_path / "critic"
    for folder, name in ((policy, "72b"), (critic, "7b")):
        folder.mkdir()
        checkpoint(folder, name)
    config = planned(policy, "learner.ranks=8", "advantage=gae", f"critic.path={critic}")
    read, judged = list[Path](), list[Config]()

    def shapes(file: Path) -> dict[str, list[int]]:
        read.append(file.parent)
        return tensor_shapes(file)

    def problems(given: Config) -> list[str]:
        judged.append(given)
        return problems_of_rules(given)

    monkeypatch.setattr("asyncrl.cli.dry_run.model_size.tensor_shapes", shapes)
    monkeypatch.setattr(fitting, "problems_of_rules", problems)
    said = plan_text(config, "learner", [])
    assert "which does not fit" in said and "of the critic" in said
    assert sorted(read) == [critic, policy]
    assert len(judged) > 10 and judged.count(config) == 1
