"""A checkpoint and its class have the same weights, in each role, or the run is refused by the names of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.model.critic import blank_classifier, build_critic, of_next_token, value_head
from asyncrl.learner.model.policy import build_model, causal_lm
from asyncrl.learner.model.reading import Checkpoint, EmptyOnMeta, pieces_of, without_weights
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.rewards.reward_model import RewardModel
from asyncrl.schema import Config, CriticConfig, ModelConfig
from tests.learner.feed import VOCABULARY, tiny_checkpoint
from tests.learner.rank_process import on_ranks, whole

CPU = torch.device("cpu")
EXTRA = ("lm_head.bias", "model.layers.0.mlp.up_proj.bias", "model.layers.7.mlp.up_proj.weight", "v_head.weight")


def with_weights(folder: Path, *names: str, to: float = 1.0) -> Path:
    """Add weights to the checkpoint in `folder`."""
    file = folder / "model.safetensors"
    added = {name: torch.full((VOCABULARY if "head" in name else 64,), to) for name in names}
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    return folder


def policy(folder: Path, **settings: Any) -> Any:
    return build_model(Config(model=ModelConfig(path=str(folder))), CPU, None, **settings)


def critic(path: Path) -> Any:
    return build_critic(Config(model=ModelConfig(path="x"), critic=CriticConfig(path=str(path))), CPU, None)


def trained_reward_model(folder: Path) -> Path:
    """A sequence classifier whose head is `score.weight` alone."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_labels=1,  # pyright: ignore[reportCallIssue]
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("extra", EXTRA)
def test_a_policy_or_reference_with_a_weight_too_many_is_refused_by_its_name(tmp_path: Path, extra: str):
    folder = with_weights(tiny_checkpoint(tmp_path), extra)
    for settings in ({}, {"path": str(folder), "frozen": True}, {"averaged": True}):
        with pytest.raises(ConfigError, match=rf"has {extra} \(1 weights\), which a Qwen2ForCausalLM has no place for"):
            policy(folder, **settings)


@pytest.mark.parametrize("extra", EXTRA)
def test_the_built_in_engine_refuses_a_weight_too_many(tmp_path: Path, extra: str):
    folder = with_weights(tiny_checkpoint(tmp_path), extra)
    with pytest.raises(ConfigError, match=f"{extra}.* no place for"):
        ModelRunner.from_pretrained(str(folder), torch.float32, CPU, 4)


def test_the_built_in_engine_refuses_a_missing_weight(tmp_path: Path):
    file = tiny_checkpoint(tmp_path) / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != "model.norm.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no model\.norm\.weight"):
        ModelRunner.from_pretrained(str(tmp_path), torch.float32, CPU, 4)


def test_buffers_of_older_checkpoints_are_no_weights_too_many(tmp_path: Path):
    policy(with_weights(tiny_checkpoint(tmp_path), "model.layers.0.self_attn.rotary_emb.inv_freq"))


def test_a_reward_model_with_a_weight_too_many_is_refused_by_its_name(tmp_path: Path):
    folder = trained_reward_model(tmp_path)
    RewardModel(str(folder))
    with pytest.raises(ConfigError, match=r"score\.bias .*Qwen2ForSequenceClassification has no place for"):
        RewardModel(str(with_weights(folder, "score.bias")))


def test_a_critic_keeps_the_head_of_a_reward_model_without_a_bias(tmp_path: Path):
    folder = trained_reward_model(tmp_path)
    head = value_head(critic(folder).hf)
    assert torch.equal(head.weight, load_file(folder / "model.safetensors")["score.weight"])
    assert head.bias is None or not head.bias.any()


def test_a_critic_whose_head_has_another_name_is_refused_and_not_made_anew(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"v_head\.weight"):
        critic(with_weights(tiny_checkpoint(tmp_path), "v_head.weight"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_needs_no_head_for_the_next_token(tmp_path: Path, tied: bool):
    folder = with_weights(tiny_checkpoint(tmp_path, tie_word_embeddings=tied), "lm_head.bias")
    assert not value_head(critic(folder).hf).weight.any()


@pytest.mark.parametrize("extra", EXTRA)
def test_ranks_that_read_their_own_parts_see_a_weight_too_many(tmp_path: Path, extra: str):
    folder = tiny_checkpoint(tmp_path)
    _, build = causal_lm(ModelConfig(path=str(folder)), "model.path", torch.float32)
    for makes, needless in ((build, set()), (lambda: blank_classifier(str(folder)), {"lm_head.bias"})):
        for added in ((), (extra,)):
            with EmptyOnMeta():
                blank = without_weights(makes())
            part = Checkpoint.of(str(with_weights(tiny_checkpoint(tmp_path), *added)))
            part.pieces = pieces_of(blank, part.shapes, may_lack=["score.weight", "score.bias"])
            assert part.unread(blank) == set(added)
            if needless:
                assert of_next_token(part.unread(blank)) == set(added) & needless
            part.opened.close()


def _rank(rank: int, folder: Path) -> None:
    backend, found = FSDP2(init_device_mesh("cpu", (2,))), {}
    given = Config(model=ModelConfig(path=str(folder / "policy")), critic=CriticConfig(path=str(folder / "rewards")))
    head = value_head(build_critic(given, CPU, backend).hf)
    found["head"] = whole(head.weight).tolist()
    try:
        build_model(given, CPU, backend)
    except ConfigError as error:
        found["refusal"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_keep_and_refuse_what_one_does(tmp_path: Path):
    with_weights(tiny_checkpoint(tmp_path / "policy"), "lm_head.bias")
    trained_reward_model(tmp_path / "rewards")
    on_ranks(_rank, 2, tmp_path, tmp_path)
    alone = value_head(critic(tmp_path / "rewards").hf).weight
    assert alone.any()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["head"] == alone.tolist()
        assert "lm_head.bias" in found["refusal"]
