"""Every override key of every preset, alone and in random combinations, against the parametric reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.losses import PRESETS, Denominators, policy_loss, preset
from asyncrl.settings.loss.rules import AGGREGATIONS, LEVELS, WEIGHTS
from tests.losses.batches import random_batch, to_inputs
from tests.losses.parametric import loss_of
from tests.losses.references import NEEDS_PROXIMAL, Array, Batch

# The released M2PO's clip range is a search over the data, rounded to float32: `references.py` has it as it is.
NAMES = [name for name in PRESETS if name != "m2po_release"]
CHANGES: list[dict[str, Any]] = [
    {},
    *({"edge": edge} for edge in "BUE"),
    *({"level": level} for level in LEVELS),
    *({"aggregation": mode, **({"constant_length": 17.0} if mode == "constant" else {})} for mode in AGGREGATIONS),
    {"clip_low": 0.05},
    {"clip_high": 0.5},
    {"dual_clip": 1.1},
    {"delta": 1.6},
    {"dual_clip": 1.3, "delta": 1.7, "clip_low": 0.1},
    {"sat_quantile": 0.6},
    {"sat_quantile": 0.9, "level": "geometric", "clip_high": 0.05, "dual_clip": 1.3},
    {"ratio_floor": 0.9},
    {"ratio_cap": 1.05},
    {"band_low": 0.95},
    {"band_high": 1.1},
    {"divergence_low": 0.01},
    {"divergence_high": 0.01},
    *({"weight": weight, "weight_low": 0.9, "weight_high": 1.2} for weight in WEIGHTS if weight != "none"),
    *(
        {"weight": weight, "weight_level": level, "weight_low": 0.9, "weight_high": 1.2}
        for weight in ("zero", "self_normalize")
        for level in ("sequence", "geometric", "segment")
    ),
    {"opsm_delta": 0.02},
    {"tau_pos": 0.4},
    {"tau_neg": 3.0},
    {"beta": 0.9},
    {"epsilon": 2.0},
    {"m2_tau": 0.002},
    {"max_age": 1},
    {"max_age": 1, "denominator": "renormalize"},
    {"weight": "zero", "weight_low": 0.9, "weight_high": 1.2, "denominator": "renormalize"},
    {"veto": 0.9},
    {"behavior_kl": 0.2},
    *({"kl_coef": 0.3, "kl": kind} for kind in ("k1", "k2", "k3", "abs", "ratio_k1", "ratio_k3")),
]


def agree(batch: Batch, name: str, changes: dict[str, Any]) -> bool:
    """Value and gradient at these settings; False where the preset refuses them."""
    row = PRESETS[name]
    inputs = to_inputs(batch, ref=True)
    try:
        config = preset(name, **changes)
        out = policy_loss(inputs, config)
    except ConfigError:
        return False
    out.loss.backward()
    reference = loss_of(row.surrogate, row.anchor == "loglinear", config)
    assert out.loss.item() == pytest.approx(reference(batch, batch.cur, batch.cur), rel=1e-9, abs=1e-12)
    assert inputs.learner_logprobs.grad is not None
    # No wrong gradient is orthogonal to a direction that is drawn.
    direction = np.random.default_rng(0).standard_normal(len(batch.cur)) * batch.mask
    got = float(inputs.learner_logprobs.grad.numpy() @ direction)
    assert got == pytest.approx(slope(reference, batch, direction), rel=1e-5, abs=1e-7)
    return True


def slope(loss: Callable[[Batch, Array, Array], float], b: Batch, direction: Array, step: float = 1e-6) -> float:
    """Central difference of the loss along `direction`."""
    up, down = loss(b, b.cur + step * direction, b.cur), loss(b, b.cur - step * direction, b.cur)
    return (up - down) / (2 * step)


def moved(name: str, half: int) -> int:
    """Of every second change, how many apply."""
    return sum(
        agree(random_batch(seed, proximal=name in NEEDS_PROXIMAL or seed % 3 > 0), name, changes)
        for seed, changes in enumerate(CHANGES)
        if seed % 2 == half
    )


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES)), ids=NAMES)
def test_each_key_moves_the_loss_as_the_formula_says(place: int, name: str) -> None:
    """Every key with half of the presets, every preset with half of the keys."""
    assert moved(name, place % 2) >= 7, "most changes must apply"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES)), ids=NAMES)
def test_each_key_moves_the_loss_as_the_formula_says_with_the_other_half(place: int, name: str) -> None:
    assert moved(name, 1 - place % 2) >= 7, "most changes must apply"


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 10**6),
    proximal=st.booleans(),
    noise=st.sampled_from([0.05, 0.4, 2.0]),
    changes=st.lists(st.sampled_from(CHANGES), min_size=2, max_size=4),
)
@example(name="ppo", seed=3007, proximal=False, noise=0.4, changes=[{"behavior_kl": 0.2}, {}])
def test_keys_together_move_it_as_they_do_alone(name, seed, proximal, noise, changes) -> None:
    merged = {key: value for change in changes for key, value in change.items()}
    agree(random_batch(seed, noise=noise, proximal=proximal), name, merged)


@pytest.mark.parametrize("name", NAMES)
def test_denominators_that_are_given_are_those_that_divide(name: str) -> None:
    """Counts of a batch twice the size, with the same tokens in it, halve the loss, whatever the mean is over."""
    inputs = to_inputs(random_batch(7))
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean"):
        config = preset(name, aggregation=mode, denominator="keep")
        mask = inputs.loss_mask
        assert inputs.group_ids is not None
        sequences, groups = (len(set(ids[mask].tolist())) for ids in (inputs.sequence_ids, inputs.group_ids))
        tokens = int(mask.sum())
        alone = policy_loss(inputs, config).loss.item()
        same = policy_loss(inputs, config, Denominators(float(tokens), float(sequences), float(groups)))
        half = policy_loss(inputs, config, Denominators(2.0 * tokens, 2.0 * sequences, 2.0 * groups))
        assert same.loss.item() == pytest.approx(alone, rel=1e-12)
        assert half.loss.item() == pytest.approx(alone / 2, rel=1e-12)
