from __future__ import annotations

import json
import math
import random
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.quickstart.agents import AGENTS
from asyncrl.quickstart.base_model import IGNORED, Conversations, main, padded
from asyncrl.quickstart.byte_tokenizer import EOS_ID

CALCULATOR = AGENTS["calculator"]


def test_what_the_tool_says_is_not_learned() -> None:
    task = Conversations(CALCULATOR)
    ids, labels = task.batch(random.Random(0), 32)
    shapes = set()
    for row, targets in zip(ids.tolist(), labels.tolist(), strict=True):
        runs = [
            (learned, task._tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
            for learned, run in groupby(zip(row, targets, strict=True), key=lambda pair: pair[1] != IGNORED)
        ]
        said = [text.replace("<|pad|>", "") for learned, text in runs if not learned]
        written = [text for learned, text in runs if learned]
        assert all(text.endswith(">") and text[:-1].strip("0123456789+-*") == "" for text in said if text)
        assert all(text.endswith("<|eos|>") for text in written)
        shapes.add(len(written))
    assert shapes == {1, 2}


def test_accuracy_is_the_probability_of_the_right_way() -> None:
    task = Conversations(CALCULATOR)
    conversation = CALCULATOR.right_conversation(CALCULATOR.sample(random.Random(0), held_out=False))
    (ids,), (labels,) = task._tokens([conversation])
    task._probes = padded([ids], [labels])

    class Sure(torch.nn.Module):
        """Gives each token of the right way this probability, and the rest to one other."""

        def __init__(self, probability: float) -> None:
            super().__init__()
            self.probability = probability

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            likely = torch.full((1, input_ids.shape[1], task.vocabulary), -math.inf)
            likely[0, :, 0] = math.log(1 - self.probability)
            likely[0, torch.arange(len(ids) - 1), torch.tensor(ids[1:])] = math.log(self.probability)
            return SimpleNamespace(logits=likely)

    written = sum(label != IGNORED for label in labels)
    for probability, greedy in ((0.9, 1.0), (0.4, 0.0)):
        model: Any = Sure(probability)
        assert task.accuracy(model, greedy=False) == pytest.approx(probability**written, rel=1e-4)
        assert task.accuracy(model, greedy=True) == greedy


@pytest.mark.parametrize("agent", AGENTS)
def test_what_is_saved_loads_as_a_model_with_its_tokenizer(agent: str, tmp_path: Path) -> None:
    recipe = {"agent": agent, "max_steps": 1, "check_every": 1, "min_sampled_accuracy": 0.0, "batch_size": 4}
    main(str(tmp_path / "m"), json.dumps(recipe))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert len(tokenizer) <= model.config.vocab_size and model.config.vocab_size % 8 == 0
    assert tokenizer.eos_token_id == EOS_ID == model.config.eos_token_id
    with pytest.raises(SystemExit, match="fewer than 100% of the samples are right"):
        main(str(tmp_path / "n"), json.dumps(recipe | {"min_sampled_accuracy": 1.0}))
