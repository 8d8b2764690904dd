"""`--dry-run`: print what would be started, and the arithmetic that decides whether it fits. Starts nothing, loads no
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from asyncrl.checks.architecture import of_its_decoder
from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.installed_vllm import missing_vllm
from asyncrl.checks.machine import model_settings
from asyncrl.checks.placement import gpus_to_plan, kind_to_plan, named, placement_of
from asyncrl.checks.rules.learner import resolved_loss, why_never_warm
from asyncrl.checks.rules.sampling import truncation
from asyncrl.cli.processes.commands import (
    learner_command,
    local_commands,
    replay_command,
    rollout_command,
    with_gpus,
)
from asyncrl.cli.starting.preflight import NOTHING_SEEN, Preflight, check_start
from asyncrl.cli.starting.resuming import check_resumed
from asyncrl.digests import run_digest
from asyncrl.memory.fit import fitting_lines
from asyncrl.memory.model_size import sizes_of
from asyncrl.memory.usage import memory_lines, size
from asyncrl.schema import Config
from asyncrl.storage.checkpoints import proven, trained_steps
from asyncrl.telemetry.folder.run_folder import changes_in


def rewarding(config: Config) -> str:
    if not config.reward.function and not config.reward.functions:
        return "which scores by itself"
    shared = "shared by all, in a Ray actor" if config.reward.host == "ray" else "each"
    return f"{config.reward.workers} reward process(es) {shared}"


def process_lines(config: Config, command: str, overrides: Sequence[str]) -> list[str]:
    counts = {
        "replay": "1 process, CPU",
        "rollout": f"{config.rollout.workers} worker(s) as {config.rollout.host}, engine {config.engine.name} on "
        f"{config.engine.device} ({config.engine.dtype}), environment {config.environment.name}, "
        f"{rewarding(config)}",
        "learner": f"{config.learner.ranks} rank(s) under torchrun on {config.learner.device} ({config.model.dtype})"
        + ", no reference model: its log-probs come with the trajectories" * config.reference.from_rollout,
    }
    alone = {"replay": replay_command, "rollout": rollout_command}
    if command == "local":
        shown = with_gpus(local_commands(config, overrides, run_id="RUN-ID"), config, gpus_to_plan(config))
    elif command == "learner":
        shown = [learner_command(config, overrides, run_id="RUN-ID")]
    else:
        shown = [alone[command](overrides)]
    lines = [line for each in shown for line in (f"{each.role}: {counts[each.role.partition('-')[0]]}", f"    {each}")]
    lacking = missing_vllm(config) if command in ("local", "rollout") else ()
    return [*lines, *(f"it would not start on this machine: {problem}" for problem in lacking)]


def placement_lines(config: Config) -> list[str]:
    """Return a table of processes, their GPUs, and the share of each GPU's memory."""
    visible = gpus_to_plan(config)
    placement = placement_of(config, len(visible))
    placed = list(placement)
    if not placed:
        return ["no process gets a GPU: " + ("none is asked for" if visible else "there is none")]
    head = f"{placement.mode}, {config.placement.gpus or len(visible)} GPU(s)"
    rows = [
        (each.name, named(each.gpus, visible), f"{each.memory:.0%}" if each.memory else "the rest") for each in placed
    ]
    wide = max(len(name) for name, _, _ in rows)
    return [head, *(f"{name:<{wide}}  GPU {gpus:<8} {share} of its memory" for name, gpus, share in rows)]


def support_line(config: Config, truncated: str) -> str:
    """Describe the data that truncated sampling adds to every token. Its limit is stated if the model is in a local
    folder."""
    vocabulary = of_its_decoder(model_settings(config.model.path)).get("vocab_size")
    most = f", at most {size(4 + math.ceil(vocabulary / 8))} (a bit per token of {vocabulary:,})" if vocabulary else ""
    return (
        f"{truncated}: each sampled token is sent with the tokens that it was drawn from: 4 bytes, and 4 for each of "
        f"them{most}"
    )


def batch_lines(config: Config) -> list[str]:
    groups, members = config.learner.groups_per_step, config.rollout.group_size
    sequences = groups * members
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = sequences * longest
    budget, attended = config.learner.max_tokens_per_microbatch, config.learner.attention_budget
    per_rank = math.ceil(tokens / config.learner.updates_per_batch / config.learner.ranks)
    most = math.ceil(per_rank / max(1, min(budget, attended) - longest + 1))
    return [
        f"a step trains {groups} groups * {members} = {sequences} sequences, in {config.learner.optimizer_steps} "
        "optimizer step(s)",
        f"at most {sequences} * ({config.data.max_prompt_tokens} prompt + {config.rollout.max_new_tokens} new) = "
        f"{tokens} tokens",
        f"at most about {most} micro-batches of {budget} tokens, {attended} in attention, per rank and optimizer step",
        f"{config.learner.steps} steps = {config.learner.steps * groups} groups, {config.learner.steps * sequences} "
        "sequences",
        *([support_line(config, truncated)] if (truncated := truncation("rollout", config.rollout)) else []),
    ]


def staleness_lines(config: Config) -> list[str]:
    depth, groups = config.replay.pipeline_depth, config.learner.groups_per_step
    lead = (depth + 1) * groups
    lines = [
        f"admission: at most (trained steps + 1 + {depth}) * {groups} groups, so a lead of {lead} groups; "
        f"{config.rollout.max_in_flight} in flight at once",
        f"hard bound: no token more than {config.replay.max_staleness} versions old is trained "
        f"(stale_policy={config.replay.stale_policy})",
    ]
    if depth == 0:
        lines.append("pipeline_depth=0: rollouts and learner take turns; neither runs ahead of the other")
    if config.rollout.max_in_flight < groups:
        lines.append(
            f"rollout.max_in_flight={config.rollout.max_in_flight} is less than a batch: it is generated in "
            f"{math.ceil(groups / config.rollout.max_in_flight)} waves"
        )
    return lines


def learning_lines(config: Config) -> list[str]:
    """Describe loss and advantage with every part that they use, and the learning rate."""
    learner, advantage = config.learner, config.advantage
    parts = (
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in loss_parts(config)
    )
    warm_up = f", after {learner.warmup_steps} steps of warm-up" if learner.warmup_steps else ""
    lines = [
        f"loss: {', '.join(parts)}",
        f"advantage: {advantage.estimator}, baseline={advantage.baseline}, std={advantage.std}"
        + (f", kl_coef={advantage.kl_coef:g}" if advantage.kl_coef else ""),
        f"learner.lr={learner.lr:g}, {learner.schedule}{warm_up}; weight_decay={learner.weight_decay:g}, "
        f"clip_norm={learner.clip_norm:g}",
        *([why] if (why := why_never_warm(config)) else []),
    ]
    if advantage.uses_critic:
        lines.append(f"critic.lr={config.critic.lr:g}")
    if config.model.compile:
        lines.append(
            "model.compile=true: torch.compile compiles the learner's decoder layers before the first step (seconds "
            "to minutes, less if they were compiled before); attention, the experts of a mixture and the head run "
            "uncompiled"
        )
    return lines


def loss_parts(config: Config) -> list[tuple[str, object]]:
    return [(name, value) for name, value in resolved_loss(config.loss).items() if value is not None]


def plan_text(config: Config, command: str, overrides: Sequence[str], found: Preflight = NOTHING_SEEN) -> str:
    """Return the whole plan under a heading that names the run. `auto` is resolved for the GPUs that are here, or
    planned for."""
    digest = run_digest(config)
    kinds = {side: kind_to_plan(config, getattr(config, side).device) for side in ("learner", "engine")}
    config = with_dtypes(config, **kinds)
    model = sizes_of(config)
    fitting = fitting_lines(config, model, command) if command in ("local", "learner") else []
    seen = {"prompts": found.prompts, "reward": found.reward} if found.prompts else {}
    sections = {
        "processes": process_lines(config, command, overrides),
        **({"placement": placement_lines(config)} if command == "local" else {}),
        **seen,
        "learning": learning_lines(config),
        "batch": batch_lines(config),
        "staleness": staleness_lines(config),
        "memory": [*memory_lines(config, model), *fitting],
    }
    head = [f"run {config.run.name} in {config.run.dir}, settings digest {digest}, seed {config.seed}"]
    for title, lines in sections.items():
        head += [f"\n{title}", *(f"  {line}" for line in lines)]
    return "\n".join([*head, "\ndry run: nothing was started"])


def resume_lines(config: Config, command: str) -> list[str]:
    """Describe which checkpoint a resume would continue from, what it would skip, and which settings it would change.

    Raises:
        CheckpointDamagedError, RunFolderError: the start would be refused because of the content of the run folder.
    """
    said: list[str] = []
    folder = Path(config.run.dir).resolve()
    local = command == "local"
    begins = check_resumed(config, said.append) if local else proven(folder, config.resume, said.append)
    if begins is not None:
        said.append(f"continues from {begins}, of step {trained_steps(begins)}")
    return [*said, *(f"this resume changes {change}" for change in changes_in(config))]


def main(command: str, overrides: Sequence[str]) -> int:
    """Print the plan. Raises ConfigError and RunFolderError as the real start would."""
    config, overrides, found = check_start(command, overrides, planned=True)
    if command in ("local", "learner"):
        for line in resume_lines(config, command):
            print(line)
    print(plan_text(config, command, overrides, found))
    return 0
