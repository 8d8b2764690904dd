"""A loss of the user's own: the same as the preset it repeats, and what the trial before a run refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from asyncrl.errors import AsyncRLError, ConfigError, UserCodeError
from asyncrl.losses import Denominators, LossConfig, policy_loss, preset
from asyncrl.losses.custom import try_loss
from asyncrl.settings.loss.meaning import check_loss, proximal_source
from tests.far_device import FAR, FarDevice
from tests.losses.batches import random_batch, to_inputs

LOSSES = """
import torch

def _ratio(inputs):
    return (inputs.learner_logprobs - inputs.behavior_logprobs).clamp(-20, 20).exp().detach()

def cispo(inputs, cap=5.0):
    ratio = _ratio(inputs)
    return -ratio.clamp(0, cap) * inputs.advantages * inputs.learner_logprobs, {"capped": (ratio > cap).float()}

class Dual:
    def __init__(self, low):
        self.low = low
    def __call__(self, inputs):
        return -inputs.advantages * inputs.learner_logprobs * (1 - self.low)

def total(inputs):
    return cispo(inputs)[0].sum()

def frozen(inputs):
    return -inputs.advantages * inputs.learner_logprobs.detach()

def whole_batch(inputs):
    return -(inputs.advantages - inputs.advantages.mean()) * inputs.learner_logprobs

def infinite(inputs):
    return -inputs.advantages * inputs.learner_logprobs / (inputs.group_ids.float())

def needs_tokens(inputs):
    inputs.learner_logprobs[inputs.loss_mask].max()
    return -inputs.learner_logprobs

def needs_prox(inputs):
    return (inputs.learner_logprobs - inputs.proximal_logprobs).square() - inputs.learner_logprobs

def proximal(inputs):
    return -inputs.advantages * (inputs.learner_logprobs - inputs.proximal_logprobs).clamp(-20, 20).exp()

def two(inputs, other):
    return -inputs.learner_logprobs

def nothing_to_learn(inputs):
    if not inputs.advantages.any():
        return torch.zeros_like(inputs.advantages)
    return -inputs.advantages * inputs.learner_logprobs

def on_the_host(inputs):
    return -inputs.advantages * inputs.learner_logprobs * torch.ones(len(inputs.advantages))

def narrows_the_mask(inputs):
    mask = inputs.loss_mask
    mask &= inputs.behavior_logprobs > -2
    return -inputs.learner_logprobs * mask
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(LOSSES)
    return str(tmp_path / "mine.py")


def own(spec: str, **settings: object) -> LossConfig:
    return LossConfig(preset="custom", function=spec, **settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_it_is_the_preset_that_it_repeats_with_every_part_around_it(file: str, aggregation: str) -> None:
    parts = {"aggregation": aggregation, "behavior_kl": 0.1, "opsm_delta": 0.2, "max_age": 2}
    found = []
    for config in (own(f"{file}:cispo", args={"cap": 1.2}, **parts), preset("cispo", ratio_cap=1.2, edge="E", **parts)):
        inputs = to_inputs(random_batch(3))
        inputs.learner_logprobs.requires_grad_()
        out = policy_loss(inputs, config, Denominators(tokens=100.0, sequences=20.0, groups=7.0))
        out.loss.backward()
        found.append((out, inputs.learner_logprobs.grad))
    (mine, my_slope), (theirs, slope) = found
    torch.testing.assert_close(mine.loss, theirs.loss)
    torch.testing.assert_close(my_slope, slope)
    assert mine.metrics["custom/capped"] == theirs.metrics["policy/clip_high"]


def test_what_works_is_let_through(file: str) -> None:
    try_loss(own(f"{file}:cispo"), proximal=False, reference=False)
    try_loss(own(f"{file}:Dual", args={"low": 0.5}), proximal=False, reference=True)
    config = own(f"{file}:proximal", edge="U")
    assert proximal_source(config, 1) == "current" and proximal_source(config, 2) == "recompute"
    check_loss(config, 1)
    try_loss(config, proximal=True, reference=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("total", "must return the loss of each token, a tensor of floats [23]"),
        ("frozen", "has no gradient"),
        ("whole_batch", "changes with the other sequences"),
        ("infinite", "not finite"),
        ("needs_tokens", "raised"),
        ("needs_prox", "raised TypeError"),
        ("two", "must take 1 argument"),
        ("none", "It defines: Dual, _ratio, cispo"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(file: str, name: str, said: str) -> None:
    with pytest.raises(AsyncRLError) as error:
        try_loss(own(f"{file}:{name}"), proximal=False, reference=False)
    assert said in str(error.value) and f"mine.py:{name}" in str(error.value)


def test_on_a_gpu_it_is_tried_there(file: str) -> None:
    """A tensor of its own that is left on the host fails there alone, in the first step."""
    with FarDevice():
        try_loss(own(f"{file}:cispo"), proximal=False, reference=False, device=FAR)
        with pytest.raises(UserCodeError, match=r"on_the_host raised RuntimeError.*two devices"):
            try_loss(own(f"{file}:on_the_host"), proximal=False, reference=False, device=FAR)
    try_loss(own(f"{file}:on_the_host"), proximal=False, reference=False)


def test_an_error_names_the_line(file: str) -> None:
    with pytest.raises(UserCodeError, match=r"needs_prox raised TypeError.*\(mine\.py, line \d+\)"):
        policy_loss(to_inputs(random_batch(0, proximal=False)), own(f"{file}:needs_prox"))


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Write loss=custom loss\.function=a\.py:f"):
        check_loss(LossConfig(preset="ppo", function="a.py:f"), 1)
    with pytest.raises(ConfigError, match=r"loss=custom needs loss\.function"):
        check_loss(LossConfig(preset="custom"), 1)
    with pytest.raises(ConfigError, match=r"does not use loss\.clip_low"):
        check_loss(own("a.py:f", clip_low=0.1), 1)


def test_garbage_outside_the_mask_does_not_reach_it(file: str) -> None:
    clean = to_inputs(random_batch(5))
    dirty = dataclasses.replace(
        clean, behavior_logprobs=torch.where(clean.loss_mask, clean.behavior_logprobs, float("nan"))
    )
    losses = [policy_loss(inputs, own(f"{file}:cispo")).loss for inputs in (clean, dirty)]
    assert losses[0] == losses[1] and losses[0].isfinite()


def test_a_micro_batch_with_a_constant_loss_has_a_backward_like_any_other(file: str) -> None:
    """On two ranks the other one waits in the reduction of its gradients."""
    config = own(f"{file}:nothing_to_learn")
    try_loss(config, proximal=False, reference=False)
    inputs = dataclasses.replace(to_inputs(random_batch(3)))
    inputs.learner_logprobs.requires_grad_()
    out = policy_loss(dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages)), config)
    assert out.loss.requires_grad
    out.loss.backward()
    assert inputs.learner_logprobs.grad is not None and not inputs.learner_logprobs.grad.any()


def test_a_loss_that_writes_into_its_inputs_is_refused(file: str) -> None:
    with pytest.raises(UserCodeError, match=r"wrote into inputs.loss_mask, which the rest of the step still reads"):
        try_loss(own(f"{file}:narrows_the_mask"), proximal=False, reference=False)
