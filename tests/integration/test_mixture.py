"""A mixture of experts with expert parallelism over two ranks, on the quickstart's task as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig

from asyncrl.quickstart.prepare import prepare
from asyncrl.quickstart.recipes import WarmupRecipe
from asyncrl.telemetry.metrics.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
EXPERTS = 4


def with_experts(source: Path, folder: Path) -> None:
    """The same function: every expert is the feed-forward layer there was, and the one they share says nothing."""
    small = AutoModelForCausalLM.from_pretrained(source)
    given = {key: value for key, value in small.config.to_dict().items() if hasattr(Qwen2MoeConfig(), key)}
    widths = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), small.config.intermediate_size)
    routed: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
    kind = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**(given | widths | routed | kind)))
    state, old = large.state_dict(), small.state_dict()
    for name, values in state.items():
        layer, _, part = name.partition(".mlp.")
        if part == "experts.gate_up_proj":
            values.copy_(torch.cat([old[f"{layer}.mlp.{half}_proj.weight"] for half in ("gate", "up")]))
        elif part == "experts.down_proj":
            values.copy_(old[f"{layer}.mlp.down_proj.weight"])
        elif part == "shared_expert.down_proj.weight":
            values.zero_()
        elif not part:
            values.copy_(old[name])
    large.generation_config = small.generation_config
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def test_two_ranks_with_different_experts_learn_the_quickstarts_task_and_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    with_experts(prepare(WarmupRecipe()) / "model", tmp_path / "model")
    for steps, more in ((8, []), (16, ["resume=auto"])):
        quickstart(tmp_path, [f"learner.steps={steps}", "learner.save_every=8", *more])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if not is_evaluation(row)]
    assert [row["step"] for row in trained] == list(range(1, 17))
    versions = [row["policy_version"] for row in trained]
    assert versions == sorted(set(versions)), "the engine served one after the other"
    greedy = [row["eval/heldout/accuracy"] for row in rows if is_evaluation(row)]
    assert greedy[-1] > greedy[0] + 0.2
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert exported.get_submodule("model.layers.0.mlp.experts").get_parameter("down_proj").shape[0] == EXPERTS


def quickstart(folder: Path, settings: list[str]) -> None:
    asked = ["learner.ranks=2", "learner.expert_parallel=2", "weights.timeout_s=300", "weights.verify_every=4"]
    paths = [f"model.path={folder}/model", f"run.dir={folder}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "quickstart", *asked, "rollout.host=process", *settings, *paths],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
