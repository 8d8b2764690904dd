"""Every rule a configuration must keep, one small function each. All that is wrong is reported at once.

A rule yields what it found: the rule, the value, the way out. Only numbers and words are looked at, so that any
process can check anywhere; what a role needs on the machine it starts on is asked by `asyncrl.machine`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.hints import join_problems, nearest
from asyncrl.losses.config import check_loss, required_inputs

if TYPE_CHECKING:
    from asyncrl.config import Config

Problems = Iterator[str]

BYTES_PER_TOKEN = 13
"""Of a stored trajectory: token id 4, loss mask 1, behavior log-prob 4, policy version 4."""

LOOPBACK = ("localhost", "::1")


def words(config: Config) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Settings that are words: key -> (value, choices)."""
    return {
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "environment.name": (config.environment.name, ("single_turn",)),
        "engine.name": (config.engine.name, ("transformers", "fake")),
        "engine.dtype": (config.engine.dtype, ("float32", "bfloat16")),
        "advantage.baseline": (config.advantage.baseline, ("mean", "loo", "none")),
        "advantage.std": (config.advantage.std, ("none", "group", "batch")),
        "rollout.host": (config.rollout.host, ("ray", "process")),
        "replay.stale_policy": (config.replay.stale_policy, ("mask", "drop", "wait")),
        "weights.transport": (config.weights.transport, ("broadcast", "files")),
        "weights.wire_dtype": (config.weights.wire_dtype, ("float32", "bfloat16")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear", "cosine")),
    }


def counts(config: Config) -> dict[str, tuple[float, float]]:
    """Settings that are numbers with a smallest value: key -> (value, smallest)."""
    return {
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1),
        "reward.workers": (config.reward.workers, 1),
        "engine.max_sequences": (config.engine.max_sequences, 1),
        "engine.threads": (config.engine.threads, 1),
        "rollout.workers": (config.rollout.workers, 1),
        "rollout.group_size": (config.rollout.group_size, 1),
        "rollout.max_new_tokens": (config.rollout.max_new_tokens, 1),
        "rollout.max_in_flight": (config.rollout.max_in_flight, 1),
        "rollout.max_attempts": (config.rollout.max_attempts, 1),
        "rollout.max_worker_restarts": (config.rollout.max_worker_restarts, 0),
        "replay.max_staleness": (config.replay.max_staleness, 0),
        "weights.bucket_mb": (config.weights.bucket_mb, 1),
        "learner.ranks": (config.learner.ranks, 1),
        "learner.groups_per_step": (config.learner.groups_per_step, 1),
        "learner.updates_per_batch": (config.learner.updates_per_batch, 1),
        "learner.steps": (config.learner.steps, 1),
        "learner.warmup_steps": (config.learner.warmup_steps, 0),
        "learner.weight_decay": (config.learner.weight_decay, 0),
        "learner.max_nonfinite_steps": (config.learner.max_nonfinite_steps, 1),
        "learner.save_every": (config.learner.save_every, 1),
        "learner.keep_checkpoints": (config.learner.keep_checkpoints, 1),
        "learner.max_restarts": (config.learner.max_restarts, 0),
        "eval.every": (config.eval.every, 0),
        "eval.rows": (config.eval.rows, 1),
        "eval.chunk": (config.eval.chunk, 1),
        "telemetry.samples_per_step": (config.telemetry.samples_per_step, 0),
        "ray.gpus_per_worker": (config.ray.gpus_per_worker, 0),
    }


def above_zero(config: Config) -> dict[str, float]:
    return {
        "rollout.temperature": config.rollout.temperature,
        "reward.timeout_s": config.reward.timeout_s,
        "replay.heartbeat_s": config.replay.heartbeat_s,
        "replay.wait_timeout_s": config.replay.wait_timeout_s,
        "weights.timeout_s": config.weights.timeout_s,
        "learner.lr": config.learner.lr,
        "learner.clip_norm": config.learner.clip_norm,
    }


def known_words(config: Config) -> Problems:
    for key, (value, choices) in words(config).items():
        if value not in choices:
            yield f"{key} must be one of {', '.join(choices)}; got {value!r}.{nearest(value, choices)}"
    for key, device in (("engine.device", config.engine.device), ("learner.device", config.learner.device)):
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}.{nearest(device, ('auto', 'cpu', 'cuda'))}"


def numbers_in_range(config: Config) -> Problems:
    for key, (value, smallest) in counts(config).items():
        if not smallest <= value < math.inf:  # as written it refuses NaN too
            yield f"{key} must be at least {smallest}; got {value}"
    for key, value in above_zero(config).items():
        # An infinite clip_norm is a norm that is reported and never clipped.
        if 0 < value < math.inf or (key == "learner.clip_norm" and value > 0):
            continue
        why = ": at 0 all samples are the argmax and a group has no spread" if key == "rollout.temperature" else ""
        yield f"{key} must be above 0 and finite{why}; got {value}"
    if not 0 < config.learner.beta2 < 1:
        yield f"learner.beta2 must be between 0 and 1; got {config.learner.beta2}"


def run_name_is_a_folder_name(config: Config) -> Problems:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.run.name) or set(config.run.name) == {"."}:
        yield f"run.name must be 1 to 64 letters, digits, `.`, `_` or `-`; got {config.run.name!r}. Rename the run"
    if not config.run.dir:
        yield "run.dir must not be empty. Leave it out for runs/<run.name>"


def resume_or_overwrite(config: Config) -> Problems:
    if config.resume != "never" and config.overwrite:
        yield (
            f"resume={config.resume} and overwrite=true contradict each other: one keeps the run folder, the other "
            "deletes what is in it. Give one of them"
        )
    # A path has a slash or names a checkpoint folder; a bare misspelt word would else be taken for a path.
    if config.resume not in ("never", "auto") and "/" not in config.resume and not Path(config.resume).exists():
        hint = nearest(config.resume, ("never", "auto"))
        yield f"resume must be never, auto or the path of a checkpoint; got {config.resume!r}.{hint}"


def depth_within_bound(config: Config) -> Problems:
    depth, bound = config.replay.pipeline_depth, config.replay.max_staleness
    if not 0 <= depth <= max(bound, 0):
        yield (
            f"replay.pipeline_depth must be between 0 and replay.max_staleness={bound}: work admitted further ahead is "
            f"over-age before it is trained; got {depth}. Set replay.pipeline_depth={max(0, min(depth, bound))}, or "
            "raise replay.max_staleness"
        )
    if config.replay.readmit_dropped and config.replay.stale_policy == "wait":
        yield (
            "replay.readmit_dropped=true does nothing with replay.stale_policy=wait, which drops no group as stale. "
            "Remove it, or choose mask or drop"
        )


def groups_have_siblings(config: Config) -> Problems:
    relative = config.advantage.baseline in ("mean", "loo") or config.advantage.std == "group"
    if relative and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size must be at least 2 when advantages are relative to the group (advantage.baseline="
            f"{config.advantage.baseline}, advantage.std={config.advantage.std}): a single trajectory's advantage is "
            f"always 0; got {config.rollout.group_size}. Raise it, or set advantage.baseline=none"
        )


def batch_divides(config: Config) -> Problems:
    groups, updates = config.learner.groups_per_step, config.learner.updates_per_batch
    if updates < 1 or config.learner.ranks < 1:
        return  # refused by numbers_in_range
    if groups % updates:
        fits = [str(n) for n in range(1, groups + 1) if groups % n == 0]
        yield (
            f"learner.groups_per_step must be a multiple of learner.updates_per_batch, so that each update gets whole "
            f"groups and an equal share; got {groups} and {updates}. {groups} divides by {', '.join(fits[:12])}"
        )
    sequences = groups * config.rollout.group_size // updates
    if sequences < config.learner.ranks:
        yield (
            f"every rank needs a sequence in every update: learner.groups_per_step * rollout.group_size / "
            f"learner.updates_per_batch = {sequences} is less than learner.ranks={config.learner.ranks}. Raise "
            "learner.groups_per_step, or use fewer ranks"
        )


def sequence_fits_microbatch(config: Config) -> Problems:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.learner.max_tokens_per_microbatch < longest:
        yield (
            f"learner.max_tokens_per_microbatch must hold the longest sequence, data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens={config.rollout.max_new_tokens} = {longest}; "
            f"got {config.learner.max_tokens_per_microbatch}. Raise it to at least {longest}"
        )


def store_bytes_needed(config: Config) -> int:
    """Most bytes of tokens the replay store can be asked to hold: the batch in training, one sealed ahead, the lead."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    sequences = config.learner.groups_per_step * config.rollout.group_size
    return (config.replay.pipeline_depth + 2) * sequences * longest * BYTES_PER_TOKEN


def store_holds_a_batch(config: Config) -> Problems:
    need = store_bytes_needed(config)
    if config.replay.max_bytes < need:
        yield (
            f"replay.max_bytes={config.replay.max_bytes} would deadlock: workers wait for bytes to be freed while the "
            f"learner waits for a batch that does not fit. (replay.pipeline_depth + 2) * learner.groups_per_step * "
            f"rollout.group_size * longest sequence * {BYTES_PER_TOKEN} bytes = {need}. Set replay.max_bytes={need} or "
            "more"
        )


def silence_outlasts_heartbeats(config: Config) -> Problems:
    beat, timeout = config.replay.heartbeat_s, config.replay.heartbeat_timeout_s
    if not 3 * beat <= timeout < math.inf:
        yield (
            f"replay.heartbeat_timeout_s must be at least 3 * replay.heartbeat_s={beat}, or one late heartbeat kills a "
            f"healthy worker; got {timeout}. Set replay.heartbeat_timeout_s={3 * beat:g} or more"
        )


def evaluation_has_rows(config: Config) -> Problems:
    if config.eval.every > 0 and not config.eval.path:
        yield (
            f"eval.every={config.eval.every} needs eval.path, a JSONL file of held-out rows. Give eval.path=..., or "
            "eval.every=0"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.eval.name):
        yield f"eval.name is part of a metric: 1 to 64 letters, digits, `.`, `_` or `-`; got {config.eval.name!r}"


def host_of(address: str) -> str:
    """`tcp://HOST:PORT` -> HOST; empty for `ipc://`."""
    found = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^:/]+)):(\d+)", address)
    return (found.group(1) or found.group(2)) if found else ""


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def address_is_safe(config: Config) -> Problems:
    address = config.replay.address
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return
    host = host_of(address)
    if host and not 0 < int(address.rpartition(":")[2]) < 65536:
        yield f"replay.address={address} has no port between 1 and 65535. Example: tcp://{host}:5577"
    if not host:
        yield f"replay.address must be tcp://HOST:PORT or ipc://PATH; got {address!r}. Example: tcp://127.0.0.1:5577"
    elif host in ("*", "0.0.0.0", "::"):
        yield (
            f"replay.address={address} would listen on every network this machine is on. Name one address of it: "
            "tcp://10.0.0.5:5577"
        )
    elif not is_loopback(host):
        if not config.replay.keys:
            yield (
                f"replay.address={address} can be reached from other machines, so replay.keys is required: "
                "make keys with `asyncrl keys DIR` and set replay.keys=DIR. On one machine use tcp://127.0.0.1:5577"
            )
        if config.weights.transport == "broadcast" and is_loopback(config.weights.host):
            yield (
                f"weights.host={config.weights.host} is this machine to every machine, while replay.address={address} "
                "invites workers from others. Set weights.host to the learner's address as the workers reach it"
            )


def loss_is_consistent(config: Config) -> Problems:
    try:
        check_loss(config.loss, config.learner.updates_per_batch)
        if "ref_logprobs" in required_inputs(config.loss):
            yield (
                f"loss.kl_coef={config.loss.kl_coef} needs a reference policy, which the learner does not have yet. "
                "Use loss.kl_coef=0; loss.behavior_kl regularises towards the policy that sampled"
            )
    except ConfigError as error:
        yield str(error)


RULES: tuple[Callable[[Config], Problems], ...] = (
    known_words,
    numbers_in_range,
    run_name_is_a_folder_name,
    resume_or_overwrite,
    depth_within_bound,
    groups_have_siblings,
    batch_divides,
    sequence_fits_microbatch,
    store_holds_a_batch,
    silence_outlasts_heartbeats,
    evaluation_has_rows,
    address_is_safe,
    loss_is_consistent,
)


def check_config(config: Config) -> None:
    """Raises ConfigError with everything that `RULES` found wrong."""
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError(join_problems(problems))
