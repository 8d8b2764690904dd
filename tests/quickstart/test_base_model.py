from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.quickstart.base_model import IGNORED, Modes, build_model, main, train
from asyncrl.quickstart.byte_tokenizer import EOS_ID, PAD_ID
from asyncrl.quickstart.recipes import WarmupRecipe


def test_only_the_answer_and_its_end_are_learned() -> None:
    ids, labels = Modes().batch(random.Random(0), 16)
    for row, targets in zip(ids.tolist(), labels.tolist(), strict=True):
        prompt_end = row.index(ord(">")) + 1
        answer_end = row.index(EOS_ID) + 1
        assert targets[:prompt_end] == [IGNORED] * prompt_end
        assert targets[prompt_end:answer_end] == row[prompt_end:answer_end]
        assert set(targets[answer_end:]) <= {IGNORED}
        assert set(row[answer_end:]) <= {PAD_ID}


def test_the_model_is_the_size_the_quickstart_speaks_of() -> None:
    model = build_model(WarmupRecipe())
    assert round(model.num_parameters() / 1000) == 149
    assert model.config.hidden_size // model.config.num_attention_heads == 32


def test_a_warm_up_that_never_gets_there_says_so() -> None:
    recipe = WarmupRecipe(max_steps=2, check_every=1, batch_size=4)
    torch.manual_seed(0)
    with pytest.raises(SystemExit, match="after 2 steps fewer than 10%"):
        train(build_model(recipe), recipe, random.Random(0), Modes())


def test_what_is_saved_loads_as_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    main(str(tmp_path / "m"), json.dumps({"max_steps": 1, "check_every": 1, "min_sampled_accuracy": 0.0}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    out = model.generate(**tokenizer("abc>", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= 4 + 3
    assert tokenizer.eos_token_id == EOS_ID == model.config.eos_token_id
