"""Training against a reward model, from launch to end."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from asyncrl.quickstart.byte_tokenizer import PAD_ID, save_byte_tokenizer
from asyncrl.quickstart.modes import LETTERS
from tests.integration.conftest import StartLocal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def letter_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier trained to say which share of a text are letters of the task."""
    torch.manual_seed(0)
    rng = random.Random(0)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=1,  # pyright: ignore[reportCallIssue]
            pad_token_id=PAD_ID,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    letters = [ord(letter) for letter in LETTERS]
    for _ in range(150):
        shares = [rng.random() for _ in range(32)]
        rows = [
            [rng.choice(letters) if rng.random() < share else rng.randrange(256) for _ in range(16)] for share in shares
        ]
        target = torch.tensor([sum(token in letters for token in row) / len(row) for row in rows])
        loss = (model(input_ids=torch.tensor(rows)).logits[:, 0] - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.01, "the judge did not learn to judge"
    folder = tmp_path_factory.mktemp("judge")
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def test_the_policy_learns_what_the_reward_model_likes(start_local: StartLocal, letter_judge: Path) -> None:
    run = start_local(
        {
            "experiment": "reward_model",
            "reward.function": "asyncrl.rewards.reward_model:RewardModel",
            "reward.model": letter_judge,
            "rollout.host": "process",
            "learner.steps": 25,
            "learner.lr": 5e-3,
        }
    )
    assert run.finish(400) == 0, run.tail()
    rewards = [row["reward/mean"] for row in run.rows()]
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:3]) + 0.1, rewards
    samples = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert all(sample["rewards"] == {} for sample in samples)
