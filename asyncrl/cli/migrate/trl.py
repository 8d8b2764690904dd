"""Translates settings of TRL's GRPO: `GRPOConfig`, and the other arguments of its scripts (model, dataset, PEFT)."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.migrate.translation import (
    PENALISED,
    Translation,
    cut,
    loggers,
    lora_targets,
    place,
    truncation,
    warm_up,
)

DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_train_epochs": 3,
    "num_processes": 1,
    "num_generations": 8,
    "max_completion_length": 256,
    "temperature": 1.0,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "gradient_checkpointing": True,
    "shuffle_dataset": True,
    "seed": 42,
    "save_steps": 500,
    "use_vllm": False,
}
"""TRL's defaults that differ from ours, or that a translation reads."""

MOVED = {
    "learning_rate": "learner.lr",
    "weight_decay": "learner.weight_decay",
    "adam_beta1": "learner.beta1",
    "adam_beta2": "learner.beta2",
    "adam_epsilon": "learner.adam_eps",
    "max_grad_norm": "learner.clip_norm",
    "num_generations": "rollout.group_size",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "gradient_checkpointing": "model.activation_checkpointing",
    "cast_lm_head_to_fp32": "model.fp32_head",
    "shuffle_dataset": "data.shuffle",
    "seed": "seed",
    "save_total_limit": "learner.keep_checkpoints",
}
LOSSES = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "bnpo": "dapo", "cispo": "cispo", "sapo": "sapo"}
SCALES = {"group": "group", "True": "group", "true": "group", "batch": "batch", "none": "none", "False": "none"}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
OPTIMIZERS = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}
REASONS = {
    "model_init_kwargs*": "set model.dtype. Code that comes with a checkpoint is never run",
    "trust_remote_code": "asyncrl never runs code that comes with a checkpoint",
    "generation_kwargs*": "sampling has only rollout.temperature, top_p, top_k and min_p",
    "chat_template_kwargs*": "model.chat.KEY=VALUE",
    "vllm_importance_sampling*": "every loss corrects with the engine's recorded log-probs: `asyncrl settings loss`",
    "vllm_gpu_memory_utilization": "only translated together with use_vllm: engine.vllm.gpu_memory_utilization",
    "vllm_*": "rollout workers have their own engines; engine.vllm.NAME=VALUE passes any argument to vLLM",
    "use_vllm": "engine=vllm",
    "num_generations_eval": "set eval.samples, eval.temperature and eval.top_p",
    "load_best_model_at_end": "learner.keep_best=METRIC keeps the best checkpoint (ckpt/best), but never returns to it",
    "metric_for_best_model": "set learner.keep_best=eval/heldout/reward, or another metric",
    "greater_is_better": "learner.keep_best_by=max or min",
    "per_device_eval_batch_size": "a worker evaluates eval.chunk rows together",
    "eval_strategy": "eval.path and eval.every",
    "mask_truncated_completions": "rollout.drop_truncated=any drops whole groups that contain one",
    "sync_ref_model": "the reference policy is never updated",
    "ref_model_*": "the reference policy is never updated",
    "top_entropy_quantile": "all sampled tokens are trained on",
    "off_policy_mask_threshold": "loss.opsm_delta",
    "use_bias_correction_kl": "loss.kl=ratio_k3",
    "multi_objective_aggregation": "advantage=gdpo, with advantage.components",
    "log_completions": "samples.jsonl has samples of every step; telemetry.samples_per_step sets how many",
    "num_completions_to_print": "samples.jsonl has samples of every step; telemetry.samples_per_step sets how many",
    "log_*": "metrics.jsonl has a row for every step",
    "logging_*": "metrics.jsonl has a row for every step",
    "remove_unused_columns": "the reward gets all columns",
    "bf16": "model.dtype=bfloat16",
    "fp16": "set model.dtype to float32 or bfloat16",
    "deepspeed": "the learner always uses FSDP2",
    "fsdp*": "FSDP2 shards over all ranks; set learner.ranks",
    "ds3_*": "the learner always uses FSDP2",
    "optim": "learner.optimizer: AdamW unless you set it",
    "lr_scheduler_kwargs*": "learner.min_lr_ratio",
    "*dtype": "model.dtype is that of the computation; the learner keeps its weights in float32",
    "attn_implementation": "the model and the device determine the kernel (docs/parallel.md)",
    "save_strategy": "learner.save_every",
    "lora_*": "only translated together with use_peft",
    "dataloader_*": "rows are read when they are drawn",
    "push_to_hub": "the model is exported to run.dir/hf; upload it yourself",
    "hub_*": "the model is exported to run.dir/hf; upload it yourself",
    "use_liger_kernel": "the head and its loss are always computed in chunks; other layers are those of transformers",
    "gradient_checkpointing_kwargs*": "model.activation_checkpointing",
    "max_tool_calling_iterations": "for several turns and tools choose an environment: environment.name",
    "use_transformers_paged": "engine=transformers does its own batching",
    "cache_implementation": "engine=transformers has its own cache",
    "load_in_*": "quantisation is not supported",
    "tools": "for several turns and tools choose an environment: environment.name",
}
"""Patterns of keys -> why there is no equivalent; the first matching pattern applies."""


def translate(given: dict[str, object]) -> Translation:
    made = Translation({key.lstrip("-"): value for key, value in given.items()}, DEFAULTS, "TRL")
    made.apply(MOVED, (_data, _model, _batches, _schedule, _loss, _advantage, _rollout, _run), REASONS)
    made.notes.append(
        "TRL waits for its completions; here rollouts run ahead by at most replay.max_staleness versions. "
        "replay: sync waits as TRL does"
    )
    return made


def _data(made: Translation) -> None:
    name, config, split = (made.take(key) for key in ("dataset_name", "dataset_config", "dataset_train_split"))
    if name is not None:
        local = str(name).startswith(("/", ".", "~")) or Path(str(name)).exists()
        parts = [str(part) for part in (config, split or ("train" if config else None)) if part is not None]
        made.put("data.path", place(name) if local else ":".join((f"hf:{name}", *parts)), "dataset_name")
    made.refuse("dataset_test_split", "eval.path=hf:NAME:SPLIT")
    # Without max_prompt_length, TRL does not limit prompts.
    if made.take("max_prompt_length"):
        cut(made, "left", "max_prompt_length", ("tools", "max_tool_calling_iterations"))
    else:
        made.put("data.overlong", "error", "max_prompt_length")
        made.notes.append(
            "TRL does not limit prompts; here a prompt longer than data.max_prompt_tokens is an error. Set it"
        )


def _model(made: Translation) -> None:
    for key in ("model", "model_name_or_path"):
        made.move(key, "model.path", place)
    if made.take("bf16"):
        made.put("model.dtype", "bfloat16", "bf16")
    if made.take("use_peft"):
        made.put("model.lora_rank", made.take("lora_r") or 16, "use_peft", "lora_r")
        made.put("model.lora_alpha", made.take("lora_alpha") or 32, "lora_alpha")
        lora_targets(made, "lora_target_modules")
        made.refuse(
            "lora_dropout",
            "adapters have no dropout, because with it the engine's log-probs would differ from the learner's",
        )
        made.refuse("lora_task_type", "a causal LM")


def _batches(made: Translation) -> None:
    batch = ("per_device_train_batch_size", "num_processes")
    per_pass = made.count(batch[0]) * made.count(batch[1])
    accumulated, group = made.count("gradient_accumulation_steps"), made.count("num_generations")
    steps = int(made.number("steps_per_generation") or accumulated)
    whole = int(made.number("generation_batch_size") or per_pass * steps)
    theirs = (*batch, "gradient_accumulation_steps", "num_generations")
    groups, updates = max(1, whole // group), max(1, whole // (per_pass * accumulated))
    if groups % updates:
        made.refuse("steps_per_generation", "each update needs whole groups; set learner.updates_per_batch")
        updates = 1
    made.put("learner.groups_per_step", groups, *theirs)
    made.put("learner.updates_per_batch", updates, "steps_per_generation", "gradient_accumulation_steps")
    if "num_processes" not in made.given:
        made.notes.append("num_processes is not in GRPOConfig: give num_processes=N as for your launcher")
    if (epochs := made.count("num_iterations")) != 1:
        made.put("learner.epochs_per_batch", epochs, "num_iterations")


def _schedule(made: Translation) -> None:
    name = str(made.take("lr_scheduler_type"))
    if name in SCHEDULES:
        made.put("learner.schedule", SCHEDULES[name], "lr_scheduler_type")
    else:
        made.refuse("lr_scheduler_type", f"learner.schedule is one of {', '.join(sorted(set(SCHEDULES.values())))}")
    rate, least = made.number("lr_scheduler_kwargs.min_lr_rate"), made.number("lr_scheduler_kwargs.min_lr")
    if name == "cosine_with_min_lr" and (rate or least):
        share = rate or (least or 0.0) / (made.number("learning_rate") or 1.0)
        made.put("learner.min_lr_ratio", share, f"lr_scheduler_kwargs.min_lr{'_rate' * bool(rate)}")
    if (optimizer := OPTIMIZERS.get(str(made.given.get("optim")))) is not None:
        made.take("optim")
        made.put("learner.optimizer", optimizer, "optim")
    steps = made.number("max_steps")
    if steps is not None and steps > 0:
        made.put("learner.steps", int(steps), "max_steps")
        made.refuse("num_train_epochs", "max_steps takes precedence, as in TRL")
    elif (epochs := made.number("num_train_epochs")) is not None:
        made.put("learner.epochs", float(epochs), "num_train_epochs")
    warm_up(made, "warmup_steps", "warmup_ratio", "max_steps")


def _loss(made: Translation) -> None:
    kind, level = str(made.take("loss_type")), str(made.take("importance_sampling_level"))
    low, high = made.number("epsilon"), made.number("epsilon_high")
    by_sequence = level == "sequence" and kind in ("grpo", "luspo", "dapo", "bnpo")
    loss = ("luspo" if kind == "luspo" else "gspo") if by_sequence else LOSSES.get(kind)
    if loss is None:
        made.refuse("loss_type", "the closest is a clip: `asyncrl settings loss` has all losses")
        loss = "dapo"
    made.put("loss", loss, "loss_type", "importance_sampling_level")
    if loss == "cispo":
        # Their `epsilon_high` is the cap itself here, and not its distance from 1.
        made.put("loss.ratio_cap", low if high is None else high, "epsilon" if high is None else "epsilon_high")
    elif loss == "sapo":
        made.move("sapo_temperature_pos", "loss.tau_pos")
        made.move("sapo_temperature_neg", "loss.tau_neg")
    else:
        made.put("loss.clip_low", low, "epsilon")
        made.put("loss.clip_high", low if high is None else high, "epsilon" if high is None else "epsilon_high")
        made.move("delta", "loss.delta")
    if by_sequence and kind in ("dapo", "bnpo"):
        made.put("loss.aggregation", "token_mean", "loss_type")
    if made.take("beta"):
        made.move("beta", "loss.kl_coef")
        if made.take("use_bias_correction_kl"):
            made.put("loss.kl", "ratio_k3", "use_bias_correction_kl")


def _advantage(made: Translation) -> None:
    scale = SCALES.get(str(made.take("scale_rewards")))
    if scale is None:
        made.refuse("scale_rewards", "advantage.std is group, batch or none")
    else:
        made.put("advantage.std", scale, "scale_rewards")


def _rollout(made: Translation) -> None:
    narrowed = truncation(made, {name: name for name in ("top_p", "top_k", "min_p")})
    if made.take("use_vllm") and not narrowed:
        made.put("engine", "vllm", "use_vllm")
        made.move("vllm_tensor_parallel_size", "engine.tensor_parallel")
        made.move("vllm_gpu_memory_utilization", "engine.vllm.gpu_memory_utilization")
        made.move("vllm_max_model_length", "engine.max_model_len")
    else:
        made.put("engine", "transformers", "use_vllm")
    if made.take("repetition_penalty") not in (None, 1.0):
        made.refuse("repetition_penalty", PENALISED)
    _rewards(made)


def _rewards(made: Translation) -> None:
    given, weights = made.take("reward_funcs"), made.take("reward_weights")
    found = given if isinstance(given, list) else [given]
    # TRL accepts `module.function`.
    specs = [each if ":" in each else ":".join(each.rsplit(".", 1)) for each in map(str, found)]
    if not all(":" in each for each in specs):
        made.refuse("reward_funcs", "name them by file or module: reward.function=FILE.py:NAME takes TRL's signature")
        made.refuse("reward_weights", "for several functions use reward.functions (docs/rewards.md)")
    elif len(specs) == 1 and not weights:
        made.put("reward.function", specs[0], "reward_funcs")
    else:
        numbers = isinstance(weights, list) and all(isinstance(each, int | float) for each in weights)
        shares = weights if numbers and len(weights) == len(specs) else [1.0] * len(specs)
        names = [spec.rpartition(":")[2] for spec in specs]
        terms = {
            name if names.count(name) == 1 else f"{name}_{place}": {"function": spec, "weight": float(share)}
            for place, (name, spec, share) in enumerate(zip(names, specs, shares, strict=True))
        }
        made.put("reward.functions", terms, "reward_funcs", "reward_weights")
        if weights and shares != weights:
            made.refuse("reward_weights", f"give one for each of reward_funcs, {len(specs)} in all")


def _run(made: Translation) -> None:
    for theirs, ours in (("save_steps", "learner.save_every"), ("eval_steps", "eval.every")):
        every = made.number(theirs)
        if every is not None and ours == "eval.every":
            made.refuse(theirs, "give eval.path and eval.every")
        elif every is not None and every >= 1:
            made.put(ours, int(every), theirs)
    made.move("output_dir", "run.dir")
    loggers(made, "report_to", ["none"])
    if made.take("resume_from_checkpoint"):
        made.refuse(
            "resume_from_checkpoint",
            "checkpoints of TRL cannot be resumed here; give the model that it saved as model.path",
        )
    made.refuse("run_name", "use run.name, which also names the folder")
