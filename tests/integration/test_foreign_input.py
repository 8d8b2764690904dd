"""Input from elsewhere: reasoning-gym tasks with their own scorers; Qwen3 and Llama folders made from configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra `gym`")

SCORER = """
import reasoning_gym

DATASETS = {}


def score(completion, row):
    name = row["task"]
    if name not in DATASETS:
        DATASETS[name] = reasoning_gym.create_dataset(name, size=1, seed=0)
    return DATASETS[name].score_answer(answer=completion.strip(), entry=row["entry"])
"""

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


@pytest.mark.parametrize(
    ("task", "model_config"),
    [
        pytest.param("chain_sum", Qwen3Config(**SHAPE, tie_word_embeddings=True), marks=pytest.mark.long),
        ("spell_backward", LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    ],
    ids=["chain_sum-qwen3", "spell_backward-llama"],
)
def test_fifty_steps_on_a_foreign_task_and_model(
    start_local: StartLocal, tmp_path: Path, task: str, model_config: PretrainedConfig
) -> None:
    torch.manual_seed(0)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(model_config).save_pretrained(model)
    save_byte_tokenizer(model)
    data, reward = tmp_path / "task.jsonl", tmp_path / "scorer.py"
    entries = reasoning_gym.create_dataset(task, size=500, seed=1)
    rows = [{"prompt": entry["question"], "task": task, "entry": entry} for entry in entries]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(SCORER)
    run = start_local(
        {
            "model.path": model,
            "data.path": data,
            "reward.function": f"{reward}:score",
            "reward.timeout_s": 60,
            "data.max_prompt_tokens": 400,
            "learner.max_tokens_per_microbatch": 2048,
            "learner.groups_per_step": 4,
            "learner.steps": 50,
            "learner.lr": "1e-4",
        }
    )
    assert run.finish(400) == 0, run.tail()
    measured = run.rows()
    assert [row["step"] for row in measured] == list(range(1, 51))
    assert not any("failed_reward" in key and value for row in measured for key, value in row.items())
