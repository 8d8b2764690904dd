"""Rules for settings that only have an effect if another one is on. If that is off, they are refused, since they would
silently do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any

from asyncrl.checks.problem import Problems
from asyncrl.schema import RunSettings

SWITCHED: dict[str, tuple[tuple[Any, ...], tuple[str, ...], str]] = {
    "model.lora_rank": ((0,), ("model.lora_alpha", "model.lora_targets"), "Set model.lora_rank=16"),
    "model.activation_checkpointing": (
        (False,),
        ("model.checkpoint_every", "model.checkpoint_keep"),
        "Set model.activation_checkpointing=true",
    ),
    "data.curriculum": (
        ("",),
        ("data.curriculum_window", "data.curriculum_explore", "data.curriculum_passes_at"),
        "Set data.curriculum=pass_rate",
    ),
    "advantage.kl_target": ((0,), ("advantage.kl_horizon",), "Set advantage.kl_target=0.01"),
    "engine.name": (
        ("transformers", "server", "sglang", "fake"),
        ("engine.tensor_parallel", "engine.max_model_len", "engine.kv_cache_mb", "engine.vllm"),
        "Use engine=vllm",
    ),
    "rollout.host": (("process",), ("ray.address", "ray.environment"), "Set rollout.host=ray"),
    "weights.transport": (("files",), ("weights.backend",), "Use weights=broadcast"),
    "replay.durability": (("memory",), ("replay.journal.retain",), "Set replay.durability=journal"),
    "replay.journal.retain": (("none", "all"), ("replay.journal.window_mb",), "Set replay.journal.retain=window"),
    "learner.schedule": (("constant",), ("learner.min_lr_ratio",), "Set learner.schedule=linear or cosine"),
    "learner.keep_best": (("",), ("learner.keep_best_by",), "Name a metric there"),
    "learner.hook": (("",), ("learner.hook_args",), "Name the hook there"),
}
"""For each switch: its off values, the settings that then have no effect, and how to turn it on."""


def switches_are_on(config: RunSettings) -> Problems:
    """Check the switches that these settings have; `asyncrl sft` has only some of them."""
    for switch, (off, keys, way_out) in SWITCHED.items():
        state = _given(config, switch)
        if state is None or state[0] not in off:
            continue
        without = f"with {switch}={state[0]}" if state[0] else f"without {switch}"
        for key in keys:
            found = _given(config, key)
            if found and found[0] != found[1]:
                yield f"{key}={found[0]} does nothing {without}. {way_out}, or {key}={found[1]}"


def without_effect(values: Mapping[str, Any]) -> set[str]:
    """Return, of all settings of a run by dotted key, those without effect because their switch is off; they were not
    set for this start."""
    return {key for switch, (off, keys, _) in SWITCHED.items() if values.get(switch) in off for key in keys}


def _given(config: RunSettings, key: str) -> tuple[Any, Any] | None:
    """Return the value of a setting and its default; None if there is no setting of this name."""
    rooms, _, name = key.rpartition(".")
    try:
        room = attrgetter(rooms)(config)
    except AttributeError:
        return None
    for each in fields(room):
        if each.name == name:
            return getattr(room, name), each.default if each.default_factory is MISSING else each.default_factory()
    return None
