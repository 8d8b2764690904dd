from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointMismatchError, ConfigError
from asyncrl.learner.batch.micro_batch import pack
from asyncrl.learner.checkpoints.checkpoint import Checkpoints, LearnerState
from asyncrl.learner.checkpoints.export import export_hf
from asyncrl.learner.model.lora import base_fingerprint
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.step.scoring import score, with_scores
from asyncrl.replay.protocol import Lease
from asyncrl.schema import Config, LearnerConfig, ModelConfig, RunConfig
from asyncrl.settings.loss.keys import LossConfig
from tests.learner.feed import FAMILIES, make_lease, make_step, tiny_checkpoint

CPU = torch.device("cpu")
STATE = LearnerState(step=0, policy_version=1, skipped_steps=0)


def config_for(path: Path, **model: object) -> Config:
    settings = {"lora_rank": 4, "lora_alpha": 8} | model
    return Config(
        model=ModelConfig(path=str(path), **settings), run=RunConfig(name="t"), learner=LearnerConfig(lr=0.01)
    )


def adapted(path: Path, family: str = "qwen2", **model: object) -> tuple[Config, PolicyModel]:
    """A model whose adapters are far from changing nothing."""
    config = config_for(tiny_checkpoint(path, family), **model)
    policy = build_model(config, CPU, None)
    shake(policy)
    return config, policy


def shake(policy: PolicyModel, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def plain_peft(config: Config, policy: PolicyModel) -> torch.nn.Module:
    """peft's own wrapper around the plain model, with the adapters of `policy`."""
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(base, settings)
    tensors = {name: tensor for name, tensor in policy.named_hf_parameters() if name.startswith("base_model.")}
    assert peft.set_peft_model_state_dict(wrapped, tensors).unexpected_keys == []
    return wrapped


def lease() -> Lease:
    return make_lease(*make_step(0, groups=2))


def loss_of_plain(model: torch.nn.Module, lease: Lease) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Sum of the log-probs of all fresh tokens, one forward per trajectory; and they themselves."""
    total, rows = torch.zeros(()), []
    for trajectory in lease.trajectories.values():
        ages = np.array([lease.plan.staleness.get(int(v), 0) for v in trajectory.policy_versions])
        fresh = torch.from_numpy(np.flatnonzero(trajectory.loss_mask & (ages <= lease.plan.max_staleness)))
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        chosen = logprobs[fresh - 1, ids[fresh]]
        total = total + chosen.sum()
        rows.append(chosen.detach().numpy())
    return total, rows


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_plain_peft(tmp_path: Path, family: str, checkpointing: bool):
    config, policy = adapted(tmp_path, family, activation_checkpointing=checkpointing)
    step, plain = lease(), plain_peft(config, policy)
    total, rows = loss_of_plain(plain, step)
    total.backward()
    members = list(step.trajectories)
    batch = pack(step, members, CPU)
    logprobs, _ = score(config, policy, batch)
    logprobs.sum().backward()
    for i, row in enumerate(rows):
        mine = logprobs[(batch.sequence_ids == i) & batch.loss_mask].detach().numpy()
        np.testing.assert_allclose(mine, row, atol=2e-5)
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    ours = {f"base_model.model.{name.removeprefix('hf.')}": p.grad for name, p in policy.named_parameters()}
    assert {name for name, gradient in ours.items() if gradient is not None} == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient is not None
        torch.testing.assert_close(ours[name], gradient, atol=1e-3, rtol=1e-3)


def test_new_adapters_change_nothing_and_are_alike_on_every_rank(tmp_path: Path):
    config = config_for(tiny_checkpoint(tmp_path))
    first, second = build_model(config, CPU, None), build_model(config, CPU, None)
    for mine, theirs in zip(first.named_hf_parameters(), second.named_hf_parameters(), strict=True):
        assert torch.equal(mine[1], theirs[1])
    base = build_model(config_for(tmp_path, lora_rank=0), CPU, None)
    batch = pack(lease(), list(lease().trajectories), CPU)
    assert torch.equal(score(config, first, batch)[0], score(config, base, batch)[0])


def test_only_adapters_are_trained_and_published(tmp_path: Path):
    config = config_for(tiny_checkpoint(tmp_path))
    roles = build_roles(config, CPU, None)
    published = dict(roles.policy.named_hf_parameters())
    trained = [p for group in roles.optimizer.param_groups for p in group["params"]]
    assert len(published) == len(trained) + 1 == 2 * 2 * 7 + 1
    assert published["adapter.rank_alpha"].tolist() == [4, 8]
    whole = sum(p.numel() for p in roles.policy.parameters())
    assert sum(p.numel() for p in trained) == sum(t.numel() for t in published.values()) - 2 < whole / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_merged_and_the_adapter_lies_beside_it(tmp_path: Path, family: str):
    config, policy = adapted(tmp_path / "model", family)
    export_hf(policy, config.model, tmp_path / "hf", rank=0)
    ids = torch.arange(5, 30)[None]
    want = plain_peft(config, policy)(input_ids=ids).logits
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(merged(input_ids=ids).logits, want, atol=1e-4, rtol=1e-4)
    head, embedding = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
    assert (head is embedding) == merged.config.tie_word_embeddings
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.equal(loaded(input_ids=ids).logits, want)


def test_a_checkpoint_of_adapters_resumes_without_the_base(tmp_path: Path):
    config = config_for(tiny_checkpoint(tmp_path / "model"))
    roles, other = (build_roles(config, CPU, None) for _ in range(2))
    learn(roles, 3)
    checkpoints = Checkpoints(tmp_path / "ckpt", rank=0, keep=1)
    path = checkpoints.save(STATE, roles, {})
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    assert len([name for name in saved if name.startswith("model.")]) == 2 * 2 * 7
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optimizer.state.")))
    checkpoints.load(path, other)
    learn(roles, 1)
    learn(other, 1)
    for mine, theirs in zip(roles.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def learn(roles: Roles, updates: int) -> None:
    for _ in range(updates):
        for parameter in roles.policy.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().cos()
        roles.optimizer.step()
        roles.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "other"}, "has other weights"),
        ({"lora_alpha": 16}, "another model.lora_alpha"),
        ({"lora_targets": ["q_proj"]}, "another model.lora_targets"),
        ({"lora_rank": 0}, "holds adapters, but model.lora_rank=0"),
    ],
)
def test_a_checkpoint_refuses_another_base(tmp_path: Path, change: dict[str, object], message: str):
    tiny_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "other", seed=1)
    checkpoints = Checkpoints(tmp_path / "ckpt", rank=0, keep=1)
    path = checkpoints.save(STATE, learned(config_for(tmp_path / "model")), {})
    if "path" in change:
        change = {"path": str(tmp_path / "other")}
    config = config_for(tmp_path / "model")
    for key, value in change.items():
        setattr(config.model, key, value)
    with pytest.raises(CheckpointMismatchError, match=message):
        checkpoints.load(path, build_roles(config, CPU, None))


def test_the_fingerprint_of_a_base_is_that_of_its_checkpoint_in_any_dtype(tmp_path: Path):
    for seed in (0, 1):
        tiny_checkpoint(tmp_path / str(seed), seed=seed)
    prints = [
        base_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / seed, dtype=dtype))
        for seed in ("0", "1")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert prints[0] == prints[1] != prints[2] == prints[3]


def learned(config: Config) -> Roles:
    roles = build_roles(config, CPU, None)
    learn(roles, 1)
    return roles


def test_a_full_checkpoint_is_refused_for_adapters(tmp_path: Path):
    full, lora = (config_for(tiny_checkpoint(tmp_path / "model"), lora_rank=rank) for rank in (0, 4))
    roles = build_roles(full, CPU, None)
    for parameter in roles.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    roles.optimizer.step()
    checkpoints = Checkpoints(tmp_path / "ckpt", rank=0, keep=1)
    path = checkpoints.save(STATE, roles, {})
    with pytest.raises(CheckpointMismatchError, match=r"holds a full model, but model\.lora_rank=4"):
        checkpoints.load(path, build_roles(lora, CPU, None))


def test_the_reference_is_the_base_with_adapters_off(tmp_path: Path):
    config, _ = adapted(tmp_path)
    config.loss = LossConfig(kl_coef=0.1)
    roles = build_roles(config, CPU, None)
    assert roles.reference is None
    shake(roles.policy)
    batch = pack(lease(), list(lease().trajectories), CPU)
    base = build_model(config_for(tmp_path, lora_rank=0), CPU, None)
    (scored,) = with_scores(config, roles, [batch])
    assert scored.ref_logprobs is not None
    assert torch.equal(scored.ref_logprobs, score(config, base, batch)[0])
    assert not torch.allclose(score(config, roles.policy, batch)[0], scored.ref_logprobs, atol=0.01)


def test_targets_choose_layers_by_the_end_of_their_name(tmp_path: Path):
    config = config_for(tiny_checkpoint(tmp_path), lora_targets=["v_proj", "0.mlp.up_proj"])
    adapters = build_model(config, CPU, None).adapters
    assert adapters is not None
    assert list(adapters.layers) == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.v_proj",
    ]


def test_a_target_that_matches_nothing_is_refused_with_the_nearest(tmp_path: Path):
    config = config_for(tiny_checkpoint(tmp_path), lora_targets=["q_porj"])
    with pytest.raises(ConfigError, match=r"'q_porj' matches no linear layer.*Did you mean `q_proj`"):
        build_model(config, CPU, None)
    config = config_for(tmp_path, lora_targets=["lm_head"])
    with pytest.raises(ConfigError, match=r"'lm_head' matches no linear layer in the blocks.*down_proj, gate_proj"):
        build_model(config, CPU, None)


def test_the_adapter_file_holds_what_peft_would_save(tmp_path: Path):
    config, policy = adapted(tmp_path / "model")
    export_hf(policy, config.model, tmp_path / "hf", rank=0)
    plain: Any = plain_peft(config, policy)
    plain.save_pretrained(str(tmp_path / "theirs"))
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "theirs"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
