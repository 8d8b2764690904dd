"""Eight ranks that share sequences, compute layers together and shard: the quickstart's task, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.cli.quickstart import prepare
from asyncrl.data.warmup_recipe import WarmupRecipe
from asyncrl.telemetry.evaluations import is_evaluation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
LAYOUT = ["learner.ranks=8", "learner.sequence_parallel=2", "learner.tensor_parallel=2"]


def with_twice_the_heads(source: Path, folder: Path) -> None:
    """The same function: each head twice, and of the output of both the half. Two heads cannot be cut into four."""
    config = AutoConfig.from_pretrained(source)
    config.head_dim = width = config.hidden_size // config.num_attention_heads
    config.num_attention_heads *= 2
    config.num_key_value_heads *= 2
    small, large = AutoModelForCausalLM.from_pretrained(source), AutoModelForCausalLM.from_config(config)

    def twice(values: Tensor, dim: int) -> Tensor:
        heads = values.unflatten(dim, (-1, width))
        return heads.repeat_interleave(2, dim).flatten(dim, dim + 1)

    state = small.state_dict()
    for name, values in state.items():
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            state[name] = twice(values, 0)
        elif name.endswith("o_proj.weight"):
            state[name] = twice(values, 1) / 2
    large.load_state_dict(state)
    large.generation_config = small.generation_config
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def test_eight_ranks_learn_the_quickstarts_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    with_twice_the_heads(prepare(WarmupRecipe()) / "model", tmp_path / "model")
    short = ["learner.steps=16", "eval.every=0", "rollout.host=process", "weights.timeout_s=300"]
    folders = [f"model.path={tmp_path}/model", f"run.dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "quickstart", *LAYOUT, *short, *folders],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    greedy = [row["eval/heldout/accuracy"] for row in rows if is_evaluation(row)]
    assert greedy[-1] > greedy[0] + 0.2
