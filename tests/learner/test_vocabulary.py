"""The critic and the reference know each token that the policy may sample, or are refused before torch is asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config import load_config
from asyncrl.data.vocabulary import ids_of, refuse_lacking, refuse_smaller_vocabulary, refuse_unknown
from asyncrl.errors import ConfigError
from asyncrl.learner.roles import build_roles
from asyncrl.quickstart.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from asyncrl.schema import Config
from tests.learner.feed import tiny_checkpoint

CPU = torch.device("cpu")
SETTINGS = {
    "critic.path": ["advantage=gae"],
    "reference.path": ["loss=grpo", "loss.kl_coef=0.1"],
}


def config_of(folder: Path, key: str, policy: int, other: int) -> Config:
    for name, rows in (("policy", policy), ("other", other)):
        tiny_checkpoint(folder / name, vocab_size=rows)
    save_byte_tokenizer(folder / "policy")
    given = [f"model.path={folder}/policy", "data.path=d", "reward.function=r.py:f", f"run.dir={folder}/run"]
    return load_config([*given, *SETTINGS[key], f"{key}={folder}/other"])


@pytest.mark.parametrize("key", SETTINGS)
def test_a_model_that_lacks_ids_of_the_tokenizer_is_refused_by_its_setting(tmp_path: Path, key: str):
    config = config_of(tmp_path, key, VOCAB_SIZE, VOCAB_SIZE - 5)
    said = (
        rf"{key}=.*/other must know every token.*has {VOCAB_SIZE - 5} ids, and the policy's tokenizer has {VOCAB_SIZE}"
    )
    with pytest.raises(ConfigError, match=said):
        refuse_smaller_vocabulary(config)
    with pytest.raises(ConfigError, match=said):
        build_roles(config, CPU, None)


@pytest.mark.parametrize("key", SETTINGS)
def test_embeddings_that_are_rounded_up_differently_are_accepted(tmp_path: Path, key: str):
    """As those of Qwen2.5 1.5B (151,936) and 7B (152,064), of which the tokenizer uses 151,665."""
    config = config_of(tmp_path, key, VOCAB_SIZE + 64, VOCAB_SIZE)
    assert ids_of(config.model.path) == VOCAB_SIZE
    refuse_smaller_vocabulary(config)
    roles = build_roles(config, CPU, None)
    assert roles.smaller_vocabularies(config) == {key: (f"{tmp_path}/other", VOCAB_SIZE)}


@pytest.mark.parametrize("key", SETTINGS)
def test_a_larger_vocabulary_than_the_policy_s_is_accepted(tmp_path: Path, key: str):
    config = config_of(tmp_path, key, VOCAB_SIZE, VOCAB_SIZE + 64)
    refuse_smaller_vocabulary(config)
    assert build_roles(config, CPU, None).smaller_vocabularies(config) == {}


def test_without_a_tokenizer_to_count_any_id_of_the_policy_counts():
    with pytest.raises(ConfigError, match="the policy has 300"):
        refuse_lacking({"critic.path": ("x", 299)}, 300, None)
    refuse_lacking({"critic.path": ("x", 300)}, 300, None)


def test_an_id_beyond_the_tokenizer_is_named_before_torch_fails():
    refuse_unknown("critic.path", 264, iter([np.array([1, 263], np.int32), np.zeros(0, np.int32)]))
    with pytest.raises(ConfigError, match=r"critic\.path: the policy sampled token id 264"):
        refuse_unknown("critic.path", 264, iter([np.array([1, 264], np.int32)]))
