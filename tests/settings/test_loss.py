"""Settings that are refused; the message names the rule, the value and what to do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from asyncrl.errors import ConfigError
from asyncrl.losses import PRESETS, LossConfig, policy_loss, preset
from asyncrl.settings.loss.keys import KEYS
from asyncrl.settings.loss.meaning import check_loss, required_inputs, resolve
from asyncrl.settings.loss.rules import SURROGATE_KEYS
from tests.losses.batches import random_batch, to_inputs


def refused(fragments: list[str], **settings) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(LossConfig(**settings))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_an_unknown_preset_lists_the_valid_ones() -> None:
    refused(["dppo", "dppo_tv", "cispo", "m2po_release"], preset="dppo")


def test_an_unknown_key_lists_the_keys_the_preset_uses() -> None:
    with pytest.raises(ConfigError, match=r"no key cap; preset 'cispo' uses .*ratio_cap"):
        preset("cispo", cap=5.0)


def test_a_key_the_preset_does_not_use_is_refused() -> None:
    refused(["'ppo'", "loss.ratio_cap=5.0", "clip_high"], preset="ppo", ratio_cap=5.0)
    refused(["loss.weight_high=2.0"], preset="ppo", weight_high=2.0)
    refused(["loss.constant_length=10.0"], preset="ppo", constant_length=10.0)
    refused(["loss.edge=E"], preset="reinforce", edge="E")


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"preset": "ppo", "clip_low": -0.1}, ["loss.clip_low", "at least 0", "-0.1"]),
        ({"preset": "ppo", "dual_clip": 1.0}, ["loss.dual_clip", "above 1"]),
        ({"preset": "ppo", "sat_quantile": 1.0}, ["loss.sat_quantile", "below 1", "1.0"]),
        ({"preset": "ppo", "sat_quantile": 0.9, "centering": True}, ["centering", "sat_quantile=0.9"]),
        ({"preset": "ppo", "delta": 1.1}, ["loss.delta", "1.2", "1.1"]),
        ({"preset": "ppo", "edge": "X"}, ["loss.edge", "B, U, E", "'X'"]),
        ({"preset": "ppo", "aggregation": "mean"}, ["loss.aggregation", "seq_mean_token_mean", "'mean'"]),
        ({"preset": "ppo", "edge": "B"}, ["loss.edge=B", "no gradient", "edge=E"]),
        ({"preset": "ppo", "edge": "E", "weight": "truncate"}, ["twice", "weight=none"]),
        ({"preset": "ppo", "kl": "k1"}, ["loss.kl=k1", "loss.kl_coef"]),
        ({"preset": "cispo", "ratio_floor": 3.0, "ratio_cap": 2.0}, ["ratio_floor", "3.0 and 2.0"]),
        ({"preset": "dis", "band_high": 0.5}, ["band_low", "0.7 and 0.5"]),
        ({"preset": "dppo_tv", "divergence_high": -1.0}, ["divergence_high", "at least 0"]),
        ({"preset": "icepop", "weight_level": "gspo_token"}, ["weight_level", "geometric"]),
    ],
)
def test_values_out_of_range_are_refused(settings: dict, fragments: list[str]) -> None:
    refused(fragments, **settings)


def test_a_filled_in_preset_resolves_to_itself() -> None:
    for name in PRESETS:
        config = preset(name)
        assert resolve(config) == config
        assert config.preset == name


def test_every_override_key_is_used_by_some_preset() -> None:
    reachable = {key for keys in SURROGATE_KEYS.values() for key in keys}
    for name in PRESETS:
        filled = preset(
            name, aggregation="constant", reject="k2", reject_high=1.0, kl_coef=0.1, opsm_delta=1.0, veto=0.1, max_age=4
        )
        reachable |= {key for key in KEYS if getattr(filled, key) is not None}
    filled = preset("custom", function="mine.py:loss", args={"cap": 2.0})
    reachable |= {key for key in KEYS if getattr(filled, key) is not None}
    assert reachable == set(KEYS)


def test_hydra_and_preset_configs_give_the_same_loss() -> None:
    inputs = to_inputs(random_batch(0))
    raw = policy_loss(inputs, LossConfig(preset="cispo", ratio_cap=1.1)).loss
    assert raw.item() == policy_loss(inputs, preset("cispo", ratio_cap=1.1)).loss.item()


@pytest.mark.parametrize("name", ["tis", "decoupled_ppo", "icepop", "geo_rs"])
def test_a_missing_proximal_policy_is_named(name: str) -> None:
    inputs = dataclasses.replace(to_inputs(random_batch(0)), proximal_logprobs=None)
    with pytest.raises(ConfigError, match=f"{name}.*needs proximal_logprobs.*detach"):
        policy_loss(inputs, preset(name))
    with pytest.raises(ConfigError, match="proximal_logprobs"):
        policy_loss(inputs, preset("ppo", edge="U"))
    with pytest.raises(ConfigError, match="twice"):
        policy_loss(inputs, preset("ppo", weight="truncate"))


def test_missing_inputs_are_named() -> None:
    inputs = dataclasses.replace(to_inputs(random_batch(0)), staleness=None)
    with pytest.raises(ConfigError, match="ref_logprobs"):
        policy_loss(inputs, preset("grpo", kl_coef=0.1))
    with pytest.raises(ConfigError, match="staleness"):
        policy_loss(inputs, preset("a3po"))
    with pytest.raises(ConfigError, match="staleness"):
        policy_loss(inputs, preset("ppo", max_age=3))


def test_inputs_that_a_loss_needs_are_known_before_the_run() -> None:
    assert required_inputs(preset("grpo", kl_coef=0.04)) == {"ref_logprobs"}
    assert required_inputs(preset("a3po")) == required_inputs(preset("ppo", max_age=2)) == {"staleness"}
    assert required_inputs(preset("scale_rl")) == {"group_ids"}
    assert not required_inputs(LossConfig())


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "decoupled_ppo"},
        {"preset": "tis", "clip_high": 0.28},
        {"preset": "ppo", "edge": "U", "weight": "truncate", "weight_high": 2.0},
    ],
)
def test_a_trust_region_on_the_update_edge_is_refused_with_one_update_per_batch(settings: dict) -> None:
    with pytest.raises(ConfigError, match=r"updates_per_batch=1.*does nothing.*updates_per_batch of 2"):
        check_loss(LossConfig(**settings), 1)
    check_loss(LossConfig(**settings), 2)


def test_an_averaged_anchor_gives_a_trust_region_on_the_update_edge_something_to_do() -> None:
    for settings in ({"preset": "decoupled_ppo"}, {"preset": "tis", "clip_high": 0.28}):
        check_loss(LossConfig(**settings), 1, averaged_anchor=True)
    for name in ("dppo_tv", "a3po"):
        with pytest.raises(ConfigError, match=rf"proximal_ema .* loss\.preset={name} does not use"):
            check_loss(LossConfig(preset=name), 2, averaged_anchor=True)


def test_a_dropped_behavior_weight_is_refused() -> None:
    for settings in ({"preset": "ppo", "edge": "U"}, {"preset": "decoupled_ppo", "weight": "none"}):
        with pytest.raises(ConfigError, match=r"drops the correction.*edge=E"):
            check_loss(LossConfig(**settings), 4)


def test_the_shipped_presets_run_with_one_update_per_batch() -> None:
    for name in set(PRESETS) - {"decoupled_ppo"}:
        check_loss(LossConfig(preset=name), 1)


def test_settings_load_no_torch() -> None:
    code = (
        "import sys, asyncrl.settings.loss.meaning as c; "
        "c.check_loss(c.preset('dppo_tv'), 1); c.proximal_source(c.LossConfig(), 2); "
        "assert not {'torch', 'jaxtyping', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
