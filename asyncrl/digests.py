"""Digests of settings: what all processes of a run must agree on, and what makes a resumed learner the same learner."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.chat.names import AUTO
from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.parallel import LAID_OUT_BY
from asyncrl.checks.rewards import reward_terms
from asyncrl.checks.sources import Source, sources
from asyncrl.checks.user_code import learner_code
from asyncrl.schema import Config
from asyncrl.user_code import code_fingerprint

OWN_TO_A_PROCESS = ("address", "keys", "local_sockets", "durability", "max_restarts", "journal")
"""Replay settings that may differ between processes."""


def shared_settings(config: Config) -> dict[str, Any]:
    """The settings that all processes of a run must agree on. Of a path only the last part counts, since paths differ
    between machines."""
    return {
        "seed": config.seed,
        "model": [
            *(Path(config.model.path).name, config.model.lora_rank, config.model.lora_alpha),
            *(["fp32_head"] if config.model.fp32_head else []),
            *([config.model.renderer, config.model.chat] if config.model.chat or config.model.renderer != AUTO else []),
        ],
        "data": [
            [_settings_of(source) for source in sources(config.data)],
            *(config.data.order_by, config.data.shuffle, config.data.max_prompt_tokens, config.data.overlong),
            *(config.data.curriculum, config.data.curriculum_window),
            *(config.data.curriculum_explore, config.data.curriculum_passes_at),
        ],
        "environment": [Path(config.environment.name).name, config.reference.from_rollout],
        "reward": _reward_of(config),
        "rollout": [
            *(config.rollout.group_size, config.rollout.min_group_size),
            *(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k, config.rollout.min_p),
            config.rollout.max_new_tokens,
        ],
        "replay": {key: value for key, value in asdict(config.replay).items() if key not in OWN_TO_A_PROCESS},
        "engine": config.engine.record_topk,
        **({"routing": True} if config.learner.router_replay else {}),
        "advantage": [config.advantage.baseline == "greedy", sorted(config.advantage.components)],
        # "float32" was the dtype on the wire. It stays for compatibility: each version now says its own dtype.
        "weights": [config.weights.transport, "float32"],
        "learner": config.learner.groups_per_step,
        "eval": [
            [
                asdict(each.config.eval) | {"path": "", "every": 0, "chunk": 0},
                _settings_of(each.source),
                Path(each.config.environment.name).name,
                _reward_of(each.config),
            ]
            for each in eval_sets(config)
        ],
    }


def _reward_of(config: Config) -> list[Any]:
    terms = (
        [term.name, Path(term.function).name, term.weight, term.args, term.data_source, Path(term.model).name]
        for term in reward_terms(config.reward)
    )
    return [*terms, config.reward.metric, config.reward.timeout_s]


def _settings_of(source: Source) -> dict[str, Any]:
    return asdict(source) | {"specs": [Path(spec).name for spec in source.specs]}


def run_digest(config: Config) -> str:
    """16 hex digits over `shared_settings`. The replay server refuses a peer with another digest."""
    text = json.dumps(shared_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


NOT_OF_THE_UPDATE = (
    *("ranks", *LAID_OUT_BY, "device", "export_every", "copy_to"),
    *("save_every", "async_save", "save_timeout_s", "keep_checkpoints", "keep_every", "keep_best", "keep_best_by"),
    *("max_restarts", "max_nonfinite_steps", "max_tokens_per_microbatch", "max_attention_per_microbatch"),
    *("reduce_gradients", "offload", "steps", "epochs", "profile"),
)
"""Learner settings that do not change how a batch updates the weights."""


def learner_digest(config: Config) -> str:
    """16 hex digits over all settings that affect how batches update the weights. A learner that resumes with the same
    digest continues its history and gets the same batches; with another one it begins a branch."""
    learner = {key: value for key, value in _given(config.learner).items() if key not in NOT_OF_THE_UPDATE}
    bounds = [config.replay.max_staleness, config.replay.stale_policy, config.replay.max_times_sampled]
    settings = {
        "seed": config.seed,
        "model": [config.model.dtype, config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets],
        "learner": learner | ({} if config.learner.schedule == "constant" else {"steps": config.learner.steps}),
        "replay": bounds,
        **{name: _given(getattr(config, name)) for name in ("loss", "advantage", "critic", "reference")},
    }
    # A path alone would not show that the file has changed.
    code = {key: code_fingerprint(spec) for key, spec in learner_code(config).items()}
    settings |= {"code": code} if code else {}
    settings |= {"fp32_head": True} if config.model.fp32_head else {}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


LATER = (
    *("epochs_per_batch", "min_lr_ratio", "beta1", "adam_eps"),
    *("function", "args", "hook", "hook_args", "centering", "sat_quantile"),
    *("entropy_coef", "skip_spikes", "optimizer", "router_replay"),
)
"""Settings added after the digest was defined. They are left out where they have their default (or are as empty as it),
so that older runs keep their digest and can be resumed."""


def _given(room: Any) -> dict[str, Any]:
    usual = asdict(type(room)())
    empty = {key for key in LATER if usual.get(key) in (None, 0, "", {})}
    return {
        key: value
        for key, value in asdict(room).items()
        if key not in LATER or (value != usual[key] and (value or key not in empty))
    }
