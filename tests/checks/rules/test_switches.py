"""Settings that have an effect only with another setting."""

from __future__ import annotations

import pytest

from asyncrl.checks.rules.switches import SWITCHED
from asyncrl.config import config_keys, load_config
from asyncrl.errors import ConfigError
from asyncrl.sft.rules import load_sft
from tests.refusals import REQUIRED

GIVEN = {
    "model.lora_alpha": "64",
    "model.lora_targets": "[q_proj]",
    "model.checkpoint_every": "2",
    "model.checkpoint_keep": "attention",
    "data.curriculum_window": "[0.1,0.9]",
    "data.curriculum_explore": "0.2",
    "data.curriculum_passes_at": "1",
    "advantage.kl_horizon": "9",
    "engine.tensor_parallel": "2",
    "engine.max_model_len": "64",
    "engine.kv_cache_mb": "64",
    "engine.vllm": "{enforce_eager: true}",
    "ray.address": "auto",
    "ray.environment": "[MY_TOKEN]",
    "weights.backend": "sockets",
    "replay.journal.retain": "all",
    "replay.journal.window_mb": "2",
    "learner.min_lr_ratio": "0.1",
    "learner.keep_best_by": "min",
    "learner.hook_args": "{a: 1}",
}
OFF = {
    "model.activation_checkpointing": "false",
    "rollout.host": "process",
    "replay.durability": "memory",
    "weights.transport": "files",
}
"""Switches that are on unless they are turned off."""


def test_the_table_names_settings_that_there_are() -> None:
    named = {*SWITCHED, *(key for _, keys, _ in SWITCHED.values() for key in keys)}
    assert named <= {*config_keys()} and {key for _, keys, _ in SWITCHED.values() for key in keys} == {*GIVEN}


@pytest.mark.parametrize("switch", SWITCHED)
def test_a_setting_that_would_do_nothing_is_refused_with_its_switch(switch: str) -> None:
    turned = [f"{switch}={OFF[switch]}"] if switch in OFF else []
    load_config([*REQUIRED, *turned])
    for key in SWITCHED[switch][1]:
        with pytest.raises(ConfigError) as refused:
            load_config([*REQUIRED, *turned, f"{key}={GIVEN[key]}"])
        (problem,) = [line for line in str(refused.value).splitlines() if key in line and "does nothing" in line]
        assert switch in problem and f", or {key}=" in problem


def test_supervised_fine_tuning_refuses_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_alpha=64 does nothing without model\.lora_rank"):
        load_sft([*REQUIRED[:2], "model.lora_alpha=64"])
    load_sft([*REQUIRED[:2], "model.lora_alpha=64", "model.lora_rank=4"])
