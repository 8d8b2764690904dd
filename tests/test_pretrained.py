"""What random tiny models hide, on a pretrained chat model: tails of the canary, and exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.chat.names import DEFAULT
from asyncrl.chat.renderer import RendererChat
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import WeightsError
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.publishing.canary import canary_of
from asyncrl.schema import Config, DataConfig, ModelConfig
from asyncrl.weights.canary import Canary, Proof
from tests.pretrained import pretrained_or_fail

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
CPU = torch.device("cpu")
QUESTIONS = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell altogether?",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of it. How much did she earn?",
    "What is the capital of France, and which river flows through it?",
    "Write a Python function that reverses a list without using the built-in method.",
)
TALK = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "2 + 3 = 5"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return pretrained_or_fail()


@pytest.fixture(scope="module")
def chat(folder: Path) -> RendererChat:
    return RendererChat(AutoTokenizer.from_pretrained(folder), DEFAULT, {}, chosen=True)


@pytest.fixture(scope="module")
def policy(folder: Path) -> PolicyModel:
    setting = ModelConfig(path=str(folder), dtype="float32")
    return build_model(Config(model=setting, data=DataConfig(path="none")), CPU, None)


def rounded(folder: Path) -> PreTrainedModel:
    """The model with the output of every module rounded to bfloat16, as a bfloat16 engine rounds it. Computing in that
    dtype takes minutes on a CPU without instructions for it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.model.modules():
        module.register_forward_hook(
            lambda _, given, out: out.bfloat16().float() if isinstance(out, torch.Tensor) else None
        )
    return model


@pytest.fixture(scope="module")
def canary(policy: PolicyModel, chat: RendererChat) -> Canary:
    """Two sets of 8 probes of 24 tokens of chats, with the last two pairs of layers exchanged as decoys."""
    texts = [chat.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    ids = np.concatenate([np.array(text, np.int32) for text in texts])
    probes = [ids[start : start + 24] for start in range(0, 16 * 8, 8)]
    return canary_of(policy, probes, CPU, "float32", "bfloat16", first=8, with_noise=True, decoys=2)


def proof(model: PreTrainedModel) -> Proof:
    return Proof(score=ModelRunner(model, CPU, 1).score, engine_dtype="bfloat16")


def test_the_canary_admits_a_right_engine_whose_rounding_has_heavy_tails(folder: Path, canary: Canary) -> None:
    found = proof(rounded(folder)).prove(1, canary)
    assert found.max > 4 * found.mean > 0, "then the tails are not those of a pretrained model"
    (first, _) = canary.sets()
    assert found.mean < first.tolerance("bfloat16").mean


def test_the_canary_refuses_an_engine_that_has_two_late_layers_exchanged(folder: Path, canary: Canary) -> None:
    wrong = rounded(folder)
    layers = wrong.model.layers
    layers[-1], layers[-2] = layers[-2], layers[-1]
    with pytest.raises(WeightsError, match="does not serve version 1"):
        proof(wrong).prove(1, canary)


@pytest.fixture
def exported(policy: PolicyModel, folder: Path, tmp_path: Path) -> Iterator[Path]:
    export_hf(policy, ModelConfig(path=str(folder), dtype="float32"), tmp_path / "hf", 0)
    yield tmp_path / "hf"


def test_an_export_renders_stops_and_computes_as_its_source(exported: Path, folder: Path) -> None:
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (exported, folder))
    assert ours.apply_chat_template(TALK, tokenize=False) == theirs.apply_chat_template(TALK, tokenize=False)
    assert ours.special_tokens_map == theirs.special_tokens_map
    ids: NDArray[np.int64] = np.array(theirs("<|im_start|>user\nWhat is 2 + 3?<|im_end|>").input_ids)
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (exported, folder)]
    assert models[0].generation_config.eos_token_id in (2, [2]) and models[1].generation_config.eos_token_id == 2
    with torch.no_grad():
        logits = [model(torch.from_numpy(ids)[None]).logits for model in models]
    assert torch.equal(*logits)
    head = models[0].get_output_embeddings()
    assert head is not None and head.weight is models[0].get_input_embeddings().weight, "a tied head"
