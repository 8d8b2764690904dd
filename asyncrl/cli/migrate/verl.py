"""Translates settings of verl's PPO command (`verl.trainer.main_ppo`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from asyncrl.cli.migrate.translation import (
    OFF,
    PENALISED,
    Translation,
    cut,
    loggers,
    lora_targets,
    place,
    truncation,
    warm_up,
)
from asyncrl.cli.migrate.verl_loss import translate_loss

DEFAULTS = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "trainer.total_epochs": 30,
}
"""verl's defaults that differ from ours, or that a translation reads."""

MOVED = {
    "data.prompt_key": "data.prompt_column",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.shuffle": "data.shuffle",
    "data.seed": "seed",
    "data.train_batch_size": "learner.groups_per_step",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.activation_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "learner.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "learner.clip_norm",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.dtype": "engine.dtype",
    "trainer.total_training_steps": "learner.steps",
    "trainer.max_actor_ckpt_to_keep": "learner.keep_checkpoints",
}
ESTIMATORS = {
    "gae": "gae",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "opo": "opo",
}
"""verl's estimators -> files of configs/advantage/. `grpo` depends on another setting as well."""
SCHEDULES = ("constant", "linear", "cosine")
AHEAD = (
    "rollouts always run beside the learner; replay.max_staleness, pipeline_depth and stale_policy say how far ahead "
    "(docs/staleness.md)"
)
GPUS = "here GPUs train or generate: divide them between learner.ranks and rollout.workers * engine.tensor_parallel"
REASONS = {
    "*trust_remote_code": "asyncrl never runs code that comes with a checkpoint",
    "trainer.nnodes": GPUS,
    "trainer.n_gpus_per_node": GPUS,
    "trainer.val_before_train": "with eval.path the first and the last weights are always evaluated",
    "trainer.project_name": "Weights & Biases reads WANDB_PROJECT",
    "trainer.default_local_dir": "checkpoints are in the run folder (run.dir), with its journal and metrics",
    "trainer.v1.*": AHEAD,
    "async_training.*": AHEAD,
    "rollout.*": AHEAD,
    "trainer.*": "it configures verl's own training loop",
    "data.val_batch_size": "a worker evaluates eval.chunk rows together",
    "data.reward_fn_key": "the reward function gets the column data_source",
    "data.custom_cls.*": "write a class with __len__ and __getitem__: data.path=file.py:Name (docs/data.md)",
    "data.sampler.*": "use data.order_by, data.curriculum, data.mixture and data.where (docs/data.md)",
    "data.*_max_samples": "cut the file, or use data.where and eval.rows",
    "data.apply_chat_template_kwargs*": "model.chat.KEY=VALUE",
    "data.*": "rows are read when they are drawn (docs/data.md)",
    "*fsdp_config.*": "FSDP2 shards parameters, gradients and optimizer over all ranks; see learner.offload",
    "*.megatron.*": "the learner always uses FSDP2",
    "*.strategy": "the learner always uses FSDP2",
    "*micro_batch_size*": "micro-batches are filled by tokens; set learner.max_tokens_per_microbatch",
    "*max_token_len_per_gpu": "micro-batches are filled by tokens; set learner.max_tokens_per_microbatch",
    "*use_dynamic_bsz": "micro-batches are always filled by tokens",
    "*use_remove_padding": "sequences are always packed, without padding",
    "*ulysses_sequence_parallel_size": "set learner.sequence_parallel, which must divide learner.ranks",
    "*use_torch_compile": "model.compile=true compiles the learner's layers (docs/parallel.md)",
    "*profiler*": "see benchmarks/, and the spans of telemetry.trace",
    "actor_rollout_ref.rollout.multi_turn.*": "for several turns and tools choose an environment: environment.name",
    "actor_rollout_ref.rollout.agent.*": "for agents choose an environment: environment.name",
    "actor_rollout_ref.rollout.val_kwargs.*": "only translated with eval.path and do_sample: eval.samples and others",
    "actor_rollout_ref.rollout.mode": "rollouts are always asynchronous",
    "actor_rollout_ref.rollout.calculate_log_probs": "the engine's log-probs are always recorded",
    "actor_rollout_ref.rollout.*_penalty": PENALISED,
    "actor_rollout_ref.rollout.free_cache_engine": "engines are separate processes and keep their memory",
    "actor_rollout_ref.rollout.load_format": "an engine gets its weights from the learner",
    "actor_rollout_ref.rollout.ignore_eos": "a completion ends with the EOS",
    "actor_rollout_ref.rollout.*": "engine.vllm.NAME=VALUE passes any argument to vLLM by its own name",
    "actor_rollout_ref.hybrid_engine": "learner and engines are always separate processes",
    "critic.*": "the critic is trained with the settings of the policy: learner.*",
    "algorithm.rollout_*": "loss=tis, seq_tis, icepop, mis and geo_rs are such corrections (docs/losses.md)",
    "*overlong_buffer*": "this changes the reward: reward=dapo, or the function overlong (docs/rewards.md)",
    "*reward_manager*": "one function, or reward.functions, makes the reward; reward=dapo is that of verl's dapo",
    "*max_resp_len": "rollout.max_new_tokens",
    "reward_model.*": "rewards run in separate processes; see reward.*",
    "reward.*": "rewards run in separate processes; see reward.* (docs/rewards.md)",
    "ray_kwargs.*": "use ray.address, or export Ray's own variables",
    "ray_init.*": "use ray.address, or export Ray's own variables",
}
"""Patterns of keys -> why there is no equivalent; the first matching pattern applies."""


def translate(given: dict[str, object]) -> Translation:
    made = Translation({key.lstrip("+"): value for key, value in given.items()}, DEFAULTS, "verl")
    made.apply(
        MOVED, (_data, _model, _batches, translate_loss, _advantage, _rollout, _evaluation, _rewards, _trainer), REASONS
    )
    made.notes.append(
        "verl waits for its rollouts; here they run ahead by at most replay.max_staleness versions. replay: "
        "sync waits as verl does"
    )
    return made


def _data(made: Translation) -> None:
    made.move("data.train_files", "data.path", place)
    if isinstance(place(made.take("data.val_files")), list):
        made.refuse("data.val_files", "eval.path is one file or folder: put the files into a folder, or join them")
    else:
        made.move("data.val_files", "eval.path", place)
    if made.take("data.filter_overlong_prompts"):
        made.put("data.overlong", "drop", "data.filter_overlong_prompts")
        made.take("data.truncation")
    elif (how := made.take("data.truncation")) == "error":
        made.put("data.overlong", how, "data.truncation")
    elif how in ("left", "right"):
        cut(made, how, "data.truncation", ("actor_rollout_ref.rollout.multi_turn.enable",))
    else:
        made.refuse("data.truncation", "prompts can be cut left or right, dropped, or an error; set data.overlong")


def _model(made: Translation) -> None:
    prefix = "actor_rollout_ref.model"
    made.move(f"{prefix}.path", "model.path", place)
    if made.take(f"{prefix}.lora_rank"):
        made.move(f"{prefix}.lora_rank", "model.lora_rank")
        made.move(f"{prefix}.lora_alpha", "model.lora_alpha")
        lora_targets(made, f"{prefix}.target_modules")


def _batches(made: Translation) -> None:
    actor = "actor_rollout_ref.actor"
    prompts, mini = made.count("data.train_batch_size"), made.count(f"{actor}.ppo_mini_batch_size")
    updates = prompts // min(mini, prompts)
    if prompts % updates:
        made.refuse(f"{actor}.ppo_mini_batch_size", "it must divide train_batch_size; set learner.updates_per_batch")
    else:
        made.put("learner.updates_per_batch", updates, "data.train_batch_size", f"{actor}.ppo_mini_batch_size")
    if (epochs := made.count(f"{actor}.ppo_epochs")) != 1:
        made.put("learner.epochs_per_batch", epochs, f"{actor}.ppo_epochs")
    longest = made.count("data.max_prompt_length") + made.count("data.max_response_length")
    budget, size = made.take(f"{actor}.ppo_max_token_len_per_gpu"), made.take(f"{actor}.ppo_micro_batch_size_per_gpu")
    if size is not None and not made.take(f"{actor}.use_dynamic_bsz"):
        size = made.count(f"{actor}.ppo_micro_batch_size_per_gpu")
        made.put("learner.max_tokens_per_microbatch", size * longest, f"{actor}.ppo_micro_batch_size_per_gpu")
    elif budget is not None:
        budget = made.count(f"{actor}.ppo_max_token_len_per_gpu")
        made.put("learner.max_tokens_per_microbatch", max(budget, longest), f"{actor}.ppo_max_token_len_per_gpu")
    elif longest > 16384:
        made.put("learner.max_tokens_per_microbatch", longest, "data.max_prompt_length", "data.max_response_length")
    _schedule(made, f"{actor}.optim")


def _schedule(made: Translation, optim: str) -> None:
    key = next((name for name in ("lr_scheduler_type", "warmup_style") if made.take(f"{optim}.{name}")), "")
    if key and made.take(f"{optim}.{key}") in SCHEDULES:
        made.move(f"{optim}.{key}", "learner.schedule")
    elif key:
        made.refuse(f"{optim}.{key}", f"learner.schedule is one of {', '.join(SCHEDULES)}")
    if made.number("trainer.total_training_steps"):
        made.refuse("trainer.total_epochs", "trainer.total_training_steps takes precedence, as in verl")
    else:
        made.move("trainer.total_epochs", "learner.epochs")
    warm_up(made, f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio", "trainer.total_training_steps")
    betas = made.take(f"{optim}.betas")
    if isinstance(betas, list) and len(betas) == 2:
        made.put("learner.beta2", betas[1], f"{optim}.betas")
        if betas[0] != 0.9:
            made.put("learner.beta1", betas[0], f"{optim}.betas")
    made.refuse(f"{optim}.total_training_steps", "learner.steps")
    falls = key and made.take(f"{optim}.{key}") != "constant"
    if made.take(f"{optim}.min_lr_ratio") is not None and falls:
        made.move(f"{optim}.min_lr_ratio", "learner.min_lr_ratio")


def _advantage(made: Translation) -> None:
    key = "algorithm.adv_estimator"
    estimator = str(made.take(key))
    by_std = made.take("algorithm.norm_adv_by_std_in_grpo")
    if estimator == "grpo":
        made.put("advantage", "grpo_std" if by_std else "grpo", key, "algorithm.norm_adv_by_std_in_grpo")
    elif estimator in ESTIMATORS:
        made.put("advantage", ESTIMATORS[estimator], key)
    else:
        made.refuse(key, f"the known ones are grpo, {', '.join(ESTIMATORS)}")
    gamma, lam = made.take("algorithm.gamma"), made.take("algorithm.lam")
    if estimator == "gae":
        made.put("advantage.lam", lam, "algorithm.lam")
        made.move("critic.optim.lr", "critic.lr")
        made.move("critic.cliprange_value", "critic.value_clip")
        made.move("trainer.critic_warmup", "critic.warmup_steps")
        made.move("critic.model.path", "critic.path", place)
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        made.put("advantage.gamma", gamma, "algorithm.gamma")
    if made.take("algorithm.use_kl_in_reward"):
        made.move("algorithm.kl_ctrl.kl_coef", "advantage.kl_coef")
        if made.take("algorithm.kl_ctrl.type") == "adaptive":
            made.move("algorithm.kl_ctrl.target_kl", "advantage.kl_target")
            made.move("algorithm.kl_ctrl.horizon", "advantage.kl_horizon")
        if made.take("algorithm.kl_penalty") not in (None, "kl", "k1"):
            made.refuse("algorithm.kl_penalty", "the penalty in the reward is log(learner / reference) (k1)")
    else:
        for name in ("kl_coef", "type", "target_kl", "horizon"):
            made.refuse(f"algorithm.kl_ctrl.{name}", "algorithm.use_kl_in_reward is off")
        made.refuse("algorithm.kl_penalty", "algorithm.use_kl_in_reward is off")
    if made.take("algorithm.filter_groups.enable"):
        made.put("rollout.drop_zero_variance", True, "algorithm.filter_groups.enable")
        made.refuse("algorithm.filter_groups.metric", "groups whose rewards are all the same are dropped")
        made.refuse("algorithm.filter_groups.max_num_gen_batches", "each dropped group makes room for one new prompt")


def _rollout(made: Translation) -> None:
    prefix = "actor_rollout_ref.rollout"
    name = made.take(f"{prefix}.name")
    narrowed = truncation(made, {"top_p": f"{prefix}.top_p", "top_k": f"{prefix}.top_k"})
    engine = "transformers" if name == "hf" or narrowed else "vllm"
    made.put("engine", engine, f"{prefix}.name")
    if name not in (None, "vllm", "hf"):
        made.refuse(f"{prefix}.name", f"the engines are vllm and transformers; {engine} replaces it")
    if engine == "vllm":
        made.move(f"{prefix}.tensor_model_parallel_size", "engine.tensor_parallel")
        made.move(f"{prefix}.max_model_len", "engine.max_model_len")
        made.move(f"{prefix}.max_num_seqs", "engine.max_sequences")
        for same in ("gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill"):
            made.move(f"{prefix}.{same}", f"engine.vllm.{same}")
        for theirs in [key for key in made.given if key.startswith(f"{prefix}.engine_kwargs.vllm.")]:
            made.move(theirs, f"engine.vllm.{theirs.rpartition('.')[2]}")


def _evaluation(made: Translation) -> None:
    """verl uses the sampling settings of evaluations only if `do_sample` is on; otherwise they are greedy, as ours."""
    prefix = "actor_rollout_ref.rollout.val_kwargs"
    heat = made.number(f"{prefix}.temperature") if made.take(f"{prefix}.do_sample") else None
    if not heat or "eval.path" not in made.settings:
        return
    made.put("eval.temperature", float(heat), f"{prefix}.temperature")
    for theirs, ours in (("n", "samples"), ("top_p", "top_p"), ("top_k", "top_k")):
        value = made.take(f"{prefix}.{theirs}")
        if value is not None and value not in OFF.get(theirs, ()):
            made.put(f"eval.{ours}", value, f"{prefix}.{theirs}")


def _reward_args(made: Translation, given: Sequence[str], prefix: str) -> dict[str, Any]:
    """Return the arguments of the reward function, with nested mappings restored; empty values are passed as well."""
    args: dict[str, Any] = {}
    for key in given:
        value = made.given[key]
        if isinstance(value, str) and "${" in value:
            made.refuse(key, "it refers to another setting of verl. Give its value in reward.args")
            continue
        made.take(key)
        *above, name = key.removeprefix(prefix).split(".")
        inner = args
        for each in above:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return args


def _rewards(made: Translation) -> None:
    """Newer versions of verl have the settings of rewards under `reward`; the older names still work there."""
    newer = any(key.startswith("reward.custom_reward_function.") for key in made.given)
    own = f"{'reward.' * newer}custom_reward_function"
    path, name = made.take(f"{own}.path"), made.take(f"{own}.name") or "compute_score"
    if path is not None:
        theirs = (f"{own}.path", *([f"{own}.name"] if f"{own}.name" in made.given else []))
        made.put("reward.function", f"{place(path)}:{name}", *theirs)
        prefix = f"{own}.reward_kwargs."
        given = [key for key in made.given if key.startswith(prefix)]
        args = _reward_args(made, given, prefix)
        if args:
            made.put("reward.args", args, *(key for key in given if key not in made.left))
    for on, model in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        if not (made.take(on) and made.take(model) is not None):
            continue
        if path is not None:
            made.refuse(on, f"there is only one reward, that of {own}")
            return
        made.put("reward", "model", on)
        made.move(model, "reward.model", place)
        return
    if path is None:
        made.notes.append(
            "verl scores by data_source where no function is given; give reward.function=FILE.py:compute_score, or a "
            "reward of configs/reward/"
        )


def _trainer(made: Translation) -> None:
    for theirs, ours in (("trainer.save_freq", "learner.save_every"), ("trainer.test_freq", "eval.every")):
        every = made.number(theirs)
        if every is not None and every > 0 and (ours != "eval.every" or "eval.path" in made.settings):
            made.put(ours, int(every), theirs)
    made.move("trainer.experiment_name", "run.name", lambda name: re.sub(r"[^A-Za-z0-9._-]+", "-", str(name))[:64])
    loggers(made, "trainer.logger", ["console", "file"])
    mode, source = made.take("trainer.resume_mode"), made.take("trainer.resume_from_path")
    if mode == "resume_path" and source:
        made.refuse(
            "trainer.resume_from_path",
            "checkpoints of verl cannot be resumed here; give the model that it exported as model.path",
        )
    elif mode in ("auto", "disable"):
        made.put("resume", "auto" if mode == "auto" else "never", "trainer.resume_mode")
