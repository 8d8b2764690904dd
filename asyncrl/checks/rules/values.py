"""Values that a setting may have by itself: one of several words, or a number in a range. For runs, and for the
settings that `asyncrl sft` shares with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from asyncrl.chat.names import AUTO, RENDERERS
from asyncrl.checks.dtypes import DTYPES
from asyncrl.checks.hints import nearest, of_yaml
from asyncrl.checks.problem import Problems
from asyncrl.evaluation.answers import EXTRACTORS
from asyncrl.evaluation.samples import MOST_SAMPLES
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
        *("gae", "vtrace", "retrace", "vtrace_turns", "retrace_turns", "custom"),
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
    "replay.order": ("fifo", "freshest"),
    "replay.durability": ("journal", "memory"),
    "replay.journal.retain": ("none", "window", "all"),
    "telemetry.on_alarm": ("continue", "stop"),
    "weights.transport": ("broadcast", "files"),
    "weights.delta": ("never", "always", "auto"),
    "weights.backend": ("auto", "sockets", "nccl", "ipc"),
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
    replay.max_restarts replay.journal.fsync_ms weights.verify_every weights.port placement.gpus
    advantage.lam_alpha advantage.kl_coef advantage.kl_target critic.warmup_steps critic.value_clip
    learner.max_attention_per_microbatch learner.epochs learner.warmup_steps learner.weight_decay learner.keep_every
    learner.export_every learner.max_restarts environment.timeout_s environment.max_tokens eval.every eval.temperature
    eval.max_new_tokens telemetry.samples_per_step ray.gpus_per_worker
"""
AT_LEAST_1 = """
    model.lora_alpha model.checkpoint_every data.max_prompt_tokens reward.workers engine.max_sequences engine.threads
    engine.tensor_parallel rollout.workers rollout.group_size rollout.max_new_tokens rollout.max_in_flight
    rollout.max_attempts replay.max_times_sampled replay.journal.segment_mb replay.journal.window_mb weights.bucket_mb
    advantage.c_bar learner.ranks learner.replicas learner.sequence_parallel learner.expert_parallel
    learner.tensor_parallel learner.groups_per_step learner.updates_per_batch learner.epochs_per_batch learner.steps
    learner.max_nonfinite_steps learner.save_every learner.keep_checkpoints eval.rows eval.chunk eval.samples
"""
ABOVE_0 = """
    rollout.temperature reward.timeout_s replay.heartbeat_s replay.wait_timeout_s weights.timeout_s advantage.kl_horizon
    critic.lr learner.lr learner.adam_eps learner.save_timeout_s
"""
SHARES = "advantage.gamma advantage.lam reward.max_failure_share learner.min_lr_ratio"
_ABOVE, _BELOW_1 = math.ulp(0.0), math.nextafter(1.0, 0.0)
Range = tuple[float, float, str]
"""Smallest and largest value, both included (infinity is not, see `out_of_range`), and the rule in words."""
FROM_0, FROM_1, POSITIVE = (0, math.inf, "at least 0"), (1, math.inf, "at least 1"), (_ABOVE, math.inf, "above 0")
RANGES: dict[str, Range] = {
    **dict.fromkeys(AT_LEAST_0.split(), FROM_0),
    **dict.fromkeys(AT_LEAST_1.split(), FROM_1),
    **dict.fromkeys(ABOVE_0.split(), (*POSITIVE[:2], "above 0 and finite")),
    **dict.fromkeys(SHARES.split(), (0, 1, "between 0 and 1")),
    **dict.fromkeys(("learner.beta1", "learner.proximal_ema"), (0, _BELOW_1, "at least 0 and below 1")),
    "learner.beta2": (_ABOVE, _BELOW_1, "above 0 and below 1"),
    "learner.clip_norm": POSITIVE,
    "telemetry.samples_per_evaluation": (0, MOST_SAMPLES, f"0 to {MOST_SAMPLES}"),
    **dict.fromkeys(("rollout.top_p", "eval.top_p"), (_ABOVE, 1, "above 0 and at most 1 (1 turns it off)")),
    **dict.fromkeys(("rollout.top_k", "eval.top_k"), (0, math.inf, "at least 0 (0 turns it off)")),
    **dict.fromkeys(("rollout.min_p", "eval.min_p"), (0, _BELOW_1, "at least 0 and below 1 (0 turns it off)")),
}
MORE = {
    "rollout.temperature": ". At 0 all samples are the argmax and a group has no spread",
    "telemetry.samples_per_evaluation": ". Samples travel with the results",
    "learner.beta1": ". The default is 0.9",
}
"""What is added to the refusal of a setting."""
LONGEST_WAIT_S = 3600.0
"""Limit on the seconds for which a request may ask the replay server to wait."""
PROCESSES = """
    model.lora_rank reward.workers reward.concurrency reward.gpus engine.max_sequences engine.threads
    engine.tensor_parallel rollout.workers rollout.group_size learner.ranks learner.replicas
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
            hint = nearest(value, choices) or of_yaml(value)
            yield f"{key} must be one of {', '.join(choices)}; got {value!r}.{hint}"


def out_of_range(config: RunSettings, ranges: Mapping[str, Range]) -> Problems:
    for key, (low, high, rule) in ranges.items():
        value = attrgetter(key)(config)
        infinite = value == math.inf and key != "learner.clip_norm"  # with it, the norm is reported and never clipped
        if infinite or not low <= value <= high:  # written like this, it refuses NaN too
            yield f"{key} must be {rule}; got {value}{MORE.get(key, '')}"


def out_of_bounds(config: RunSettings) -> Problems:
    for key, value in _numbers(config):
        if key.endswith("_s") and 0 < value < SHORTEST_S:
            yield f"{key} must be at least {SHORTEST_S}, a millisecond, where it is not 0; got {value}"
        counted = MOST_COUNTED if isinstance(value, int) else None
        most = MOST.get(key, MOST_OF.get(f"_{key.rpartition('_')[2]}", counted))
        if most is not None and most < abs(value) < math.inf:
            yield f"{key} must be at most {most:,}; got {value}. Set {key}={most} or less"


def _numbers(settings: Any, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Iterate over `(key, value)` of every setting that is a number."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{each.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{each.name}", value


def in_words(words: Mapping[str, tuple[str, ...]], ranges: Mapping[str, Range]) -> dict[str, str]:
    """Return key -> its allowed values in words."""
    found = {key: ", ".join(choices) for key, choices in words.items()}
    found |= {key: rule.removesuffix(" and finite") for key, (_, _, rule) in ranges.items()}
    limits = {key: MOST.get(key, MOST_OF.get(f"_{key.rpartition('_')[2]}")) for key in found}
    return {key: f"{said}, at most {most:,}" if (most := limits[key]) else said for key, said in found.items()}
