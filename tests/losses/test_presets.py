"""Every named loss against its independent reference: value and gradient."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.losses import PRESETS, policy_loss, preset
from tests.losses.batches import random_batch, to_inputs
from tests.losses.references import NEEDS_PROXIMAL, REFERENCES, gradient

SEEDS = range(6)
NO_PROXIMAL = [name for name in PRESETS if name not in NEEDS_PROXIMAL]


def compare(name: str, seed: int, proximal: bool, noise: float = 0.4) -> None:
    batch = random_batch(seed, noise=noise, proximal=proximal)
    inputs = to_inputs(batch)
    out = policy_loss(inputs, preset(name))
    out.loss.backward()
    reference = REFERENCES[name]
    # The released M2PO rounds its clip range to float32 and puts it exactly on one token, where no difference quotient
    # exists; that token is left out.
    released = name == "m2po_release"
    value = reference(batch, batch.cur, batch.cur)
    assert out.loss.item() == pytest.approx(value, rel=1e-5 if released else 1e-9, abs=1e-12)
    grad = inputs.learner_logprobs.grad
    assert grad is not None
    differs = ~np.isclose(grad.numpy(), gradient(reference, batch), rtol=1e-5, atol=1e-8)
    assert differs.sum() <= (1 if released else 0), (grad.numpy()[differs], gradient(reference, batch)[differs])


def test_every_preset_has_a_reference_and_a_yaml() -> None:
    assert set(PRESETS) == set(REFERENCES)
    configs = Path(__file__).parents[2] / "configs" / "loss"
    assert {path.stem for path in configs.glob("*.yaml")} == {*PRESETS, "custom"}


@pytest.mark.parametrize("name", PRESETS)
def test_value_and_gradient_equal_the_reference_with_a_proximal_policy(name: str) -> None:
    for seed in SEEDS:
        compare(name, seed, proximal=True)


@pytest.mark.parametrize("name", NO_PROXIMAL)
def test_value_and_gradient_equal_the_reference_on_the_behavior_edge(name: str) -> None:
    for seed in SEEDS:
        compare(name, seed, proximal=False)


@pytest.mark.parametrize("name", PRESETS)
def test_value_and_gradient_equal_the_reference_at_large_ratios(name: str) -> None:
    for seed in (10, 11):
        compare(name, seed, proximal=True, noise=2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_float32_is_close_to_float64(name: str) -> None:
    batch = random_batch(3)
    single = policy_loss(to_inputs(batch, torch.float32), preset(name)).loss
    double = policy_loss(to_inputs(batch), preset(name)).loss
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(double.item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_loss_tokens_costs_nothing(name: str) -> None:
    batch = random_batch(0)
    batch.mask[:] = False
    inputs = to_inputs(batch)
    out = policy_loss(inputs, preset(name))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert inputs.learner_logprobs.grad is not None
    assert not inputs.learner_logprobs.grad.any()


def test_the_table_in_the_documentation_says_everything_of_every_preset() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    lines = page.partition("## All presets")[2].partition("## ")[0].splitlines()
    rows = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in lines if line.startswith("| `")]
    assert [name.strip("`") for name, *_ in rows] == list(PRESETS)
    for row, (name, _, _, defaults, *_) in zip(PRESETS.values(), rows, strict=True):
        assert defaults == (", ".join(f"{key} {value}" for key, value in row.defaults.items()) or "none"), name
    assert all(len(row) == 7 and all(row) for row in rows)
