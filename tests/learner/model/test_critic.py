from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from asyncrl.errors import ConfigError
from asyncrl.learner.model.critic import CriticModel, build_critic, value_head, value_loss
from asyncrl.schema import Config, CriticConfig, ModelConfig
from tests.learner.batch.test_micro_batch import packed_step
from tests.learner.feed import FAMILIES, tiny_checkpoint

CPU = torch.device("cpu")


def critic_of(path: Path, critic_path: str = "") -> CriticModel:
    return build_critic(Config(model=ModelConfig(path=str(path)), critic=CriticConfig(path=critic_path)), CPU, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_value_head_starts_at_zero_on_the_backbone_of_the_policy(tmp_path: Path, family: str):
    critic = critic_of(tiny_checkpoint(tmp_path, family))
    assert all(not parameter.any() for parameter in value_head(critic.hf).parameters())
    policy = dict(critic.hf.base_model.named_parameters())
    assert policy and any(parameter.any() for parameter in policy.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_is_that_of_the_sequence_alone_up_to_the_token_before(tmp_path: Path, family: str):
    torch.manual_seed(0)
    critic = critic_of(tiny_checkpoint(tmp_path / "policy", family))
    torch.nn.init.normal_(value_head(critic.hf).weight)
    critic.hf.save_pretrained(tmp_path / "critic")
    alone = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    again = critic_of(tmp_path / "policy", str(tmp_path / "critic"))
    lease, micro_batches = packed_step(1)
    for members, batch in micro_batches:
        values = again(batch)
        assert not values[~batch.loss_mask].any()
        for i, member in enumerate(members):
            ids = torch.from_numpy(lease.trajectories[member].token_ids).long()
            mine = (batch.sequence_ids == i) & batch.loss_mask
            expected = alone(input_ids=ids[None]).logits[0, batch.position_ids[mine] - 1, 0]
            torch.testing.assert_close(values[mine], expected, atol=1e-4, rtol=1e-4)


def test_a_critic_that_cannot_be_loaded_is_refused_with_its_path(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"critic\.path=.*nothing_here.*num_labels=1"):
        critic_of(tiny_checkpoint(tmp_path / "policy"), str(tmp_path / "nothing_here"))


def test_a_critic_s_checkpoint_that_lacks_weights_is_refused_and_not_filled_up_at_random(tmp_path: Path):
    folder = tiny_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"critic\.path=.* its checkpoint has no model\.norm\.weight \(1 weights\)"):
        critic_of(folder)


def test_the_value_loss_is_half_the_squared_error_per_loss_token():
    values, targets = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.0, 4.0, 0.0])
    mask = torch.tensor([True, True, False])
    loss = value_loss(values, targets, torch.zeros(3), mask, 0.0, 4.0)
    assert loss.item() == pytest.approx(0.5 * (1 + 4) / 4)


def test_a_clipped_value_has_no_gradient_once_it_moved_further_towards_its_target():
    old, targets, mask = torch.zeros(2), torch.tensor([1.0, 1.0]), torch.ones(2, dtype=torch.bool)
    values = torch.tensor([0.1, 0.5], requires_grad=True)
    loss = value_loss(values, targets, old, mask, 0.2, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.9**2 + 0.8**2) / 2)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.45, 0.0]))
