"""Words and numbers: what each setting may be by itself, and the run folder."""

from __future__ import annotations

import math
import re
from pathlib import Path

from asyncrl.chat.names import AUTO, RENDERERS
from asyncrl.checks.dtypes import DTYPES
from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.hints import nearest
from asyncrl.checks.problem import Problems
from asyncrl.checks.rewards import MODEL_REWARD, reward_terms
from asyncrl.checks.sampling import evaluation_is_truncated_within_bounds
from asyncrl.errors import ConfigError
from asyncrl.evaluation.answers import EXTRACTORS
from asyncrl.evaluation.samples import MOST_SAMPLES
from asyncrl.losses.rules import CHOICES, RANGES
from asyncrl.placement import MODES
from asyncrl.schema import Config, RunSettings

ENVIRONMENTS = ("single_turn", "tools", "python", "search", "reasoning_gym", "gymnasium", "openai", "verifiers")
ESTIMATORS = (
    *("group", "gdpo", "turns", "turns_by_number", "reinforce_pp"),
    *("gae", "vtrace", "retrace", "vtrace_turns", "retrace_turns", "own"),
)


def words(config: Config) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Settings that are words: key -> (value, choices)."""
    return {
        "model.renderer": (config.model.renderer, (AUTO, *RENDERERS)),
        "model.dtype": (config.model.dtype, DTYPES),
        "data.overlong": (config.data.overlong, ("drop", "truncate_left", "truncate_right", "error")),
        "engine.name": (config.engine.name, ("vllm", "transformers", "server", "fake")),
        "engine.dtype": (config.engine.dtype, DTYPES),
        "advantage.estimator": (config.advantage.estimator, ESTIMATORS),
        "advantage.baseline": (config.advantage.baseline, ("mean", "loo", "opo", "greedy", "none")),
        "advantage.std": (config.advantage.std, ("none", "group", "batch")),
        "eval.answer": (config.eval.answer, (*EXTRACTORS, "none")),
        "reward.metric": (config.reward.metric, ("reward", "accuracy")),
        "reward.host": (config.reward.host, ("worker", "ray")),
        "rollout.host": (config.rollout.host, ("ray", "process")),
        "rollout.drop_truncated": (config.rollout.drop_truncated, ("never", "any", "all")),
        "replay.stale_policy": (config.replay.stale_policy, ("mask", "drop", "wait")),
        "replay.admission": (config.replay.admission, ("group", "sample")),
        "replay.order": (config.replay.order, ("fifo", "freshest", "prioritized", "uniform", "ess")),
        "replay.durability": (config.replay.durability, ("journal", "memory")),
        "replay.journal.retain": (config.replay.journal.retain, ("none", "window", "all")),
        "telemetry.on_alarm": (config.telemetry.on_alarm, ("continue", "stop")),
        "weights.transport": (config.weights.transport, ("broadcast", "files")),
        "weights.senders": (config.weights.senders, ("rank0", "all")),
        "weights.delta": (config.weights.delta, ("never", "always", "auto")),
        "weights.backend": (config.weights.backend, ("auto", "nccl", "gloo")),
        "placement.mode": (config.placement.mode, MODES),
        "weights.on_update": (config.weights.on_update, ("keep", "recompute")),
        "weights.wire_dtype": (config.weights.wire_dtype, DTYPES),
        "model.checkpoint_keep": (config.model.checkpoint_keep, CHECKPOINT_KEEPS),
        "learner.keep_best_by": (config.learner.keep_best_by, ("max", "min")),
        "learner.reduce_gradients": (config.learner.reduce_gradients, ("auto", "last", "each")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear", "cosine")),
    }


CHECKPOINT_KEEPS = ("nothing", "attention", "matmul")
"""Of `model.checkpoint_keep`, see `asyncrl.learner.recompute`."""


def counts(config: Config) -> dict[str, tuple[float, float]]:
    """Settings that are numbers with a smallest value: key -> (value, smallest)."""
    return {
        "model.lora_rank": (config.model.lora_rank, 0),
        "model.lora_alpha": (config.model.lora_alpha, 1),
        "model.checkpoint_every": (config.model.checkpoint_every, 1),
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1),
        "reward.workers": (config.reward.workers, 1),
        "reward.concurrency": (config.reward.concurrency, 0),
        "reward.gpus": (config.reward.gpus, 0),
        "engine.max_sequences": (config.engine.max_sequences, 1),
        "engine.threads": (config.engine.threads, 1),
        "engine.tensor_parallel": (config.engine.tensor_parallel, 1),
        "engine.max_model_len": (config.engine.max_model_len, 0),
        "engine.record_topk": (config.engine.record_topk, 0),
        "engine.kv_cache_mb": (config.engine.kv_cache_mb, 0),
        "rollout.workers": (config.rollout.workers, 1),
        "rollout.group_size": (config.rollout.group_size, 1),
        "rollout.min_group_size": (config.rollout.min_group_size, 0),
        "rollout.max_new_tokens": (config.rollout.max_new_tokens, 1),
        "rollout.max_in_flight": (config.rollout.max_in_flight, 1),
        "rollout.max_attempts": (config.rollout.max_attempts, 1),
        "rollout.max_worker_restarts": (config.rollout.max_worker_restarts, 0),
        "replay.max_staleness": (config.replay.max_staleness, 0),
        "replay.window": (config.replay.window, 0),
        "replay.max_times_sampled": (config.replay.max_times_sampled, 1),
        "replay.group_timeout_s": (config.replay.group_timeout_s, 0),
        "replay.max_restarts": (config.replay.max_restarts, 0),
        "replay.shards": (config.replay.shards, 0),
        "replay.journal.fsync_ms": (config.replay.journal.fsync_ms, 0),
        "replay.journal.segment_mb": (config.replay.journal.segment_mb, 1),
        "replay.journal.window_mb": (config.replay.journal.window_mb, 1),
        "weights.bucket_mb": (config.weights.bucket_mb, 1),
        "weights.verify_every": (config.weights.verify_every, 0),
        "weights.port": (config.weights.port, 0),
        "placement.gpus": (config.placement.gpus, 0),
        "advantage.lam_alpha": (config.advantage.lam_alpha, 0),
        "advantage.c_bar": (config.advantage.c_bar, 1),
        "advantage.kl_coef": (config.advantage.kl_coef, 0),
        "advantage.kl_target": (config.advantage.kl_target, 0),
        "critic.warmup_steps": (config.critic.warmup_steps, 0),
        "critic.value_clip": (config.critic.value_clip, 0),
        "learner.ranks": (config.learner.ranks, 1),
        "learner.replicas": (config.learner.replicas, 1),
        "learner.sequence_parallel": (config.learner.sequence_parallel, 1),
        "learner.tensor_parallel": (config.learner.tensor_parallel, 1),
        "learner.groups_per_step": (config.learner.groups_per_step, 1),
        "learner.updates_per_batch": (config.learner.updates_per_batch, 1),
        "learner.epochs_per_batch": (config.learner.epochs_per_batch, 1),
        "learner.early_groups": (config.learner.early_groups, 0),
        "learner.max_attention_per_microbatch": (config.learner.max_attention_per_microbatch, 0),
        "learner.steps": (config.learner.steps, 1),
        "learner.epochs": (config.learner.epochs, 0),
        "learner.warmup_steps": (config.learner.warmup_steps, 0),
        "learner.weight_decay": (config.learner.weight_decay, 0),
        "learner.max_nonfinite_steps": (config.learner.max_nonfinite_steps, 1),
        "learner.save_every": (config.learner.save_every, 1),
        "learner.keep_checkpoints": (config.learner.keep_checkpoints, 1),
        "learner.keep_every": (config.learner.keep_every, 0),
        "learner.export_every": (config.learner.export_every, 0),
        "learner.max_restarts": (config.learner.max_restarts, 0),
        "environment.timeout_s": (config.environment.timeout_s, 0),
        "environment.max_tokens": (config.environment.max_tokens, 0),
        "eval.every": (config.eval.every, 0),
        "eval.rows": (config.eval.rows, 1),
        "eval.chunk": (config.eval.chunk, 1),
        "eval.samples": (config.eval.samples, 1),
        "eval.temperature": (config.eval.temperature, 0),
        "eval.max_new_tokens": (config.eval.max_new_tokens, 0),
        "telemetry.samples_per_step": (config.telemetry.samples_per_step, 0),
        "run.disk_patience_s": (config.run.disk_patience_s, 0),
        "ray.gpus_per_worker": (config.ray.gpus_per_worker, 0),
    }


SAID = {
    "engine.device": "auto, cpu, cuda, cuda:N",
    "learner.device": "auto, cpu, cuda, cuda:N",
    "advantage.gamma": "0 to 1",
    "advantage.lam": "0 to 1",
    "learner.proximal_ema": "at least 0, below 1",
    "learner.beta2": "above 0, below 1",
    "learner.skip_spikes": "0, or above 1",
    "replay.pipeline_depth": "0 to replay.max_staleness",
    "telemetry.samples_per_evaluation": f"0 to {MOST_SAMPLES}",
    **dict.fromkeys(("rollout.top_p", "eval.top_p"), "above 0, at most 1"),
    **dict.fromkeys(("rollout.top_k", "eval.top_k"), "at least 0"),
    **dict.fromkeys(("rollout.min_p", "eval.min_p"), "at least 0, below 1"),
}
"""What the other rules allow, in words."""


def allowed() -> dict[str, str]:
    """Key -> what it may be, for the settings whose own value is judged by a rule."""
    config = Config()
    found = {key: ", ".join(choices) for key, (_, choices) in words(config).items()}
    found |= {key: f"at least {smallest:g}" for key, (_, smallest) in counts(config).items()}
    found |= dict.fromkeys(above_zero(config), "above 0")
    found |= {f"loss.{key}": ", ".join(choices) for key, choices in CHOICES.items()}
    found |= {f"loss.{key}": rule for key, _, _, rule in RANGES}
    return found | SAID


def above_zero(config: Config) -> dict[str, float]:
    return {
        "rollout.temperature": config.rollout.temperature,
        "reward.timeout_s": config.reward.timeout_s,
        "replay.heartbeat_s": config.replay.heartbeat_s,
        "replay.wait_timeout_s": config.replay.wait_timeout_s,
        "weights.timeout_s": config.weights.timeout_s,
        "advantage.kl_horizon": config.advantage.kl_horizon,
        "critic.lr": config.critic.lr,
        "learner.lr": config.learner.lr,
        "learner.clip_norm": config.learner.clip_norm,
        "learner.adam_eps": config.learner.adam_eps,
        "learner.save_timeout_s": config.learner.save_timeout_s,
    }


def one_device_for_all(device: str, ranks: int) -> str:
    """What is wrong with a numbered `learner.device` for several ranks of a machine."""
    return (
        f"learner.device={device} puts all {ranks} ranks of a machine on one GPU; use learner.device=cuda, which gives "
        "each its own (CUDA_VISIBLE_DEVICES chooses which), or learner.ranks=1"
    )


def known_words(config: Config) -> Problems:
    for key, (value, choices) in words(config).items():
        if value not in choices:
            yield f"{key} must be one of {', '.join(choices)}; got {value!r}.{nearest(value, choices)}"
    for key, device in (("engine.device", config.engine.device), ("learner.device", config.learner.device)):
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            yield f"{key} must be auto, cpu, cuda or cuda:N; got {device!r}.{nearest(device, ('auto', 'cpu', 'cuda'))}"
    if ":" in config.learner.device and config.learner.ranks > 1:
        yield one_device_for_all(config.learner.device, config.learner.ranks)


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
    for key, value in (("advantage.gamma", config.advantage.gamma), ("advantage.lam", config.advantage.lam)):
        if not 0 <= value <= 1:
            yield f"{key} must be between 0 and 1; got {value}"
    if not 0 <= config.reward.max_failure_share <= 1:
        yield f"reward.max_failure_share must be between 0 and 1; got {config.reward.max_failure_share}"
    if not 0 <= config.learner.proximal_ema < 1:
        yield f"learner.proximal_ema must be at least 0 and below 1; got {config.learner.proximal_ema}"
    if config.learner.skip_spikes != 0 and not 1 < config.learner.skip_spikes < math.inf:
        yield f"learner.skip_spikes must be 0 (off) or above 1, times the median; got {config.learner.skip_spikes}"
    kept = config.telemetry.samples_per_evaluation
    if not 0 <= kept <= MOST_SAMPLES:
        yield f"telemetry.samples_per_evaluation must be 0 to {MOST_SAMPLES}: they travel with the results; got {kept}"
    if not 0 < config.learner.beta2 < 1:
        yield f"learner.beta2 must be between 0 and 1; got {config.learner.beta2}"


def run_name_is_a_folder_name(config: RunSettings) -> Problems:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.run.name) or set(config.run.name) == {"."}:
        yield f"run.name must be 1 to 64 letters, digits, `.`, `_` or `-`; got {config.run.name!r}. Rename the run"
    if not config.run.dir:
        yield "run.dir must not be empty. Leave it out for runs/<run.name>"


def resume_or_overwrite(config: RunSettings) -> Problems:
    if config.resume != "never" and config.overwrite:
        yield (
            f"resume={config.resume} and overwrite=true contradict each other: one keeps the run folder, the other "
            "deletes what is in it. Give one of them"
        )
    # A path has a slash or names a checkpoint folder; a bare misspelt word would else be taken for a path.
    if config.resume not in ("never", "auto") and "/" not in config.resume and not Path(config.resume).exists():
        hint = nearest(config.resume, ("never", "auto"))
        yield f"resume must be never, auto or the path of a checkpoint; got {config.resume!r}.{hint}"


def reward_is_whole(config: Config) -> Problems:
    reward = config.reward
    try:
        terms = reward_terms(reward)
    except ConfigError as error:
        yield str(error)
        return
    for term in terms:
        key = f"reward.functions.{term.name}" if term.name else "reward"
        if term.function == MODEL_REWARD and not term.model:
            of = term.name or "reward=model"
            yield f"{of} needs the model: give {key}.model=PATH of a classifier with one output"
    if reward.host == "ray" and not terms:
        yield "reward.host=ray shares a reward among the workers, and reward.function is not set. Leave it out"
    if reward.host == "ray" and config.rollout.host != "ray":
        yield (
            f"reward.host=ray is a Ray actor and rollout.host={config.rollout.host} starts no Ray. Set "
            "rollout.host=ray, or reward.host=worker"
        )
    if reward.gpus > 0 and reward.host != "ray":
        yield (
            f"reward.gpus={reward.gpus} is asked of Ray for the reward service, and reward.host={reward.host} has "
            "none. Set reward.host=ray, or reward.gpus=0 (reward processes see the GPUs of their rollout worker)"
        )


SPEC = re.compile(r".+:[A-Za-z_]\w*")
"""`file.py:name` or `package.module:name`."""


def environment_is_one(config: Config) -> Problems:
    name = config.environment.name
    if name not in ENVIRONMENTS and not SPEC.fullmatch(name):
        yield (
            f"environment.name must be one of {', '.join(ENVIRONMENTS)}, or yours as file.py:Name or "
            f"package.module:Name; got {name!r}.{nearest(name, ENVIRONMENTS)}"
        )


def prompts_are_cut_where_they_are_read(config: Config) -> Problems:
    # One of the user's is looked at where its class is known, in `environments.registry`.
    if config.environment.name in ENVIRONMENTS[1:] and config.data.overlong.startswith("truncate_"):
        yield cuts_nothing(config.environment.name, config.data.overlong)


def cuts_nothing(environment: str, overlong: str) -> str:
    """The refusal of a cut that an environment would never see."""
    return (
        f"data.overlong={overlong} cuts the tokens of a prompt, and environment={environment} reads the row's "
        "messages, whole. Give data.overlong=drop or error, or a larger data.max_prompt_tokens"
    )


def filters_name_functions(config: Config) -> Problems:
    for spec in config.rollout.filters:
        if not SPEC.fullmatch(spec):
            yield (
                f"rollout.filters names functions as file.py:name or package.module:name; got {spec!r}. Example: "
                "rollout.filters=[my_filters.py:keep]"
            )


def evaluation_has_rows(config: Config) -> Problems:
    if config.eval.every > 0 and not config.eval.path and not config.eval.sets:
        yield (
            f"eval.every={config.eval.every} needs eval.path, a JSONL file of held-out rows, or eval.sets. Give "
            "eval.path=..., or eval.every=0"
        )
    yield from _evaluation_is_one(config)
    try:
        sets = eval_sets(config)
    except ConfigError as error:
        yield str(error)
        return
    known = {problem for rule in OF_A_SET for problem in rule(config)}
    for each in sets:
        found = (problem for rule in OF_A_SET for problem in rule(each.config))
        yield from (f"{each.key}: {problem}" for problem in found if problem not in known)


def _evaluation_is_one(config: Config) -> Problems:
    """By its own settings."""
    if config.eval.samples > 1 and config.eval.temperature == 0:
        yield (
            f"eval.samples={config.eval.samples} at eval.temperature=0 are so many times the same completion. Give "
            "eval.temperature=1, or eval.samples=1"
        )
    if not math.isfinite(config.eval.pass_score):
        yield f"eval.pass_score must be a finite number; got {config.eval.pass_score}"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.eval.name):
        yield f"eval.name is part of a metric: 1 to 64 letters, digits, `.`, `_` or `-`; got {config.eval.name!r}"


OF_A_SET = (
    *(known_words, numbers_in_range, reward_is_whole, environment_is_one, prompts_are_cut_where_they_are_read),
    _evaluation_is_one,
    evaluation_is_truncated_within_bounds,
)
"""Rules that an entry of `eval.sets` can break by itself."""

RULES = (
    known_words,
    numbers_in_range,
    run_name_is_a_folder_name,
    resume_or_overwrite,
    reward_is_whole,
    environment_is_one,
    prompts_are_cut_where_they_are_read,
    filters_name_functions,
    evaluation_has_rows,
)
