"""Values that a setting may have by itself: one of several words, or a number in a range. For runs, and for the
settings that `asyncrl sft` shares with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from asyncrl.chat.names import AUTO, RENDERERS
from asyncrl.checks.dtypes import DTYPES
from asyncrl.checks.hints import nearest
from asyncrl.checks.problem import Problems
from asyncrl.evaluation.answers import EXTRACTORS
from asyncrl.placement import MODES
from asyncrl.schema import RunSettings

WORDS: dict[str, tuple[str, ...]] = {
    "model.renderer": (AUTO, *RENDERERS),
    "model.dtype": DTYPES,
    "data.overlong": ("drop", "truncate_left", "truncate_right", "error"),
    "engine.name": ("vllm", "transformers", "server", "sglang", "fake"),
    "engine.dtype": DTYPES,
    "advantage.estimator": (
        *("group", "gdpo", "turns", "turns_by_number", "reinforce_pp"),
        *("gae", "vtrace", "retrace", "vtrace_turns", "retrace_turns", "own"),
    ),
    "advantage.baseline": ("mean", "loo", "opo", "greedy", "none"),
    "advantage.std": ("none", "group", "batch"),
    "eval.answer": (*EXTRACTORS, "none"),
    "reward.metric": ("reward", "accuracy"),
    "reward.host": ("worker", "ray"),
    "rollout.host": ("ray", "process"),
    "rollout.drop_truncated": ("never", "any", "all"),
    "replay.stale_policy": ("mask", "drop", "wait"),
    "replay.admission": ("group", "sample"),
    "replay.order": ("fifo", "freshest", "prioritized", "uniform", "ess"),
    "replay.durability": ("journal", "memory"),
    "replay.journal.retain": ("none", "window", "all"),
    "telemetry.on_alarm": ("continue", "stop"),
    "weights.transport": ("broadcast", "files", "pull"),
    "weights.senders": ("rank0", "all"),
    "weights.copies": ("two", "none"),
    "weights.slices": ("auto", "never"),
    "weights.delta": ("never", "always", "auto"),
    "weights.backend": ("auto", "nccl", "gloo", "ipc"),
    "placement.mode": MODES,
    "weights.on_update": ("keep", "recompute"),
    "weights.wire_dtype": DTYPES,
    "model.checkpoint_keep": ("nothing", "attention", "matmul"),
    "learner.keep_best_by": ("max", "min"),
    "learner.offload": ("none", "optimizer", "all"),
    "learner.optimizer": ("adamw", "adamw_8bit"),
    "learner.reduce_gradients": ("auto", "last", "each"),
    "learner.schedule": ("constant", "linear", "cosine"),
}
AT_LEAST_0 = """
    model.lora_rank reward.concurrency reward.gpus engine.max_model_len engine.record_topk engine.kv_cache_mb
    rollout.min_group_size rollout.max_worker_restarts replay.max_staleness replay.window replay.group_timeout_s
    replay.max_restarts replay.shards replay.journal.fsync_ms weights.verify_every weights.port placement.gpus
    advantage.lam_alpha advantage.kl_coef advantage.kl_target critic.warmup_steps critic.value_clip learner.early_groups
    learner.max_attention_per_microbatch learner.epochs learner.warmup_steps learner.weight_decay learner.keep_every
    learner.export_every learner.max_restarts environment.timeout_s environment.max_tokens eval.every eval.temperature
    eval.max_new_tokens telemetry.samples_per_step run.disk_patience_s ray.gpus_per_worker
"""
AT_LEAST_1 = """
    model.lora_alpha model.checkpoint_every data.max_prompt_tokens reward.workers engine.max_sequences engine.threads
    engine.tensor_parallel rollout.workers rollout.group_size rollout.max_new_tokens rollout.max_in_flight
    rollout.max_attempts replay.max_times_sampled replay.journal.segment_mb replay.journal.window_mb weights.bucket_mb
    advantage.c_bar learner.ranks learner.replicas learner.sequence_parallel learner.expert_parallel
    learner.tensor_parallel learner.groups_per_step learner.updates_per_batch learner.epochs_per_batch learner.steps
    learner.max_nonfinite_steps learner.save_every learner.keep_checkpoints eval.rows eval.chunk eval.samples
"""
SMALLEST: dict[str, int] = {**dict.fromkeys(AT_LEAST_0.split(), 0), **dict.fromkeys(AT_LEAST_1.split(), 1)}
ABOVE_ZERO = (
    *("rollout.temperature", "reward.timeout_s", "replay.heartbeat_s", "replay.wait_timeout_s", "weights.timeout_s"),
    *("advantage.kl_horizon", "critic.lr", "learner.lr", "learner.clip_norm", "learner.adam_eps"),
    "learner.save_timeout_s",
)
LONGEST_WAIT_S = 3600.0
"""Limit on the seconds for which a request may ask the replay server to wait."""
PROCESSES = """
    model.lora_rank reward.workers reward.concurrency reward.gpus engine.max_sequences engine.threads
    engine.tensor_parallel rollout.workers rollout.group_size replay.shards learner.ranks learner.replicas
    learner.sequence_parallel learner.expert_parallel learner.tensor_parallel eval.samples ray.gpus_per_worker
    placement.gpus
"""
MOST: dict[str, int] = {
    **dict.fromkeys(PROCESSES.split(), 1 << 16),
    **{"weights.port": 65_535, "replay.wait_timeout_s": int(LONGEST_WAIT_S)},
    **dict.fromkeys(("learner.lr", "critic.lr", "learner.adam_eps"), 1),  # with AdamW, a step moves a weight by lr
    "learner.weight_decay": 1000,
    **dict.fromkeys(("seed", "replay.max_bytes"), (1 << 63) - 1),
    **dict.fromkeys(("learner.epochs", "advantage.kl_horizon"), (1 << 31) - 1),
}
"""Upper limits by key: more processes than any machine has, and values that cannot be intended."""
MOST_OF: dict[str, int] = {"_s": 1_000_000, "_ms": 60_000, "_mb": 1 << 24}
"""Upper limits by the suffix of a key: seconds that a system call can still wait for, milliseconds, MiB."""
SHORTEST_S = 0.001
MOST_COUNTED = (1 << 31) - 1
"""Upper limit of every other count: versions and positions of tokens are stored in 32 bits."""


def other_words(config: RunSettings, words: Mapping[str, tuple[str, ...]]) -> Problems:
    for key, choices in words.items():
        value = attrgetter(key)(config)
        if value not in choices:
            yield f"{key} must be one of {', '.join(choices)}; got {value!r}.{nearest(value, choices)}"


def out_of_range(config: RunSettings, smallest: Mapping[str, float], above_zero: Iterable[str]) -> Problems:
    for key, least in smallest.items():
        value = attrgetter(key)(config)
        if not least <= value < math.inf:  # written like this, it refuses NaN too
            yield f"{key} must be at least {least}; got {value}"
    for key in above_zero:
        value = attrgetter(key)(config)
        # With an infinite clip_norm, the norm is reported and never clipped.
        if 0 < value < math.inf or (key == "learner.clip_norm" and value > 0):
            continue
        why = ": at 0 all samples are the argmax and a group has no spread" if key == "rollout.temperature" else ""
        yield f"{key} must be above 0 and finite{why}; got {value}"


def out_of_bounds(config: RunSettings) -> Problems:
    for key, value in _numbers(config):
        if key.endswith("_s") and 0 < value < SHORTEST_S:
            yield f"{key} must be at least {SHORTEST_S}, a millisecond, where it is not 0; got {value}"
        most = most_of(key, value)
        if most is not None and most < abs(value) < math.inf:
            yield f"{key} must be at most {most:,}; got {value}. Set {key}={most} or less"


def most_of(key: str, value: float) -> int | None:
    """Return the upper limit of a setting; None if it is neither a count nor a time and has no limit of its own."""
    ending = f"_{key.rpartition('_')[2]}"
    counted = MOST_COUNTED if isinstance(value, int) else None
    return MOST.get(key, MOST_OF.get(ending, counted))


def _numbers(settings: Any, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Iterate over `(key, value)` of every setting that is a number."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{each.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{each.name}", value


def in_words(
    words: Mapping[str, tuple[str, ...]], smallest: Mapping[str, float], above_zero: Iterable[str]
) -> dict[str, str]:
    """Return key -> its allowed values in words."""
    found = {key: ", ".join(choices) for key, choices in words.items()}
    found |= {key: f"at least {least:g}" for key, least in smallest.items()}
    found |= dict.fromkeys(above_zero, "above 0")
    return {key: f"{said}, at most {most:,}" if (most := most_of(key, 0.0)) else said for key, said in found.items()}
