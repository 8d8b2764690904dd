"""`--dry-run`: what would be started, and the arithmetic that decides if it fits. Starts nothing, loads no torch."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.learner import resolved_loss
from asyncrl.checks.machine import check_machine
from asyncrl.checks.parallel import ParallelDims
from asyncrl.checks.replay import store_bytes_needed
from asyncrl.checks.sampling import truncations
from asyncrl.cli.commands import (
    learner_command,
    local_commands,
    replay_command,
    rollout_command,
    shard_command,
    with_gpus,
)
from asyncrl.cli.placement_table import gpus_to_plan, placement_lines
from asyncrl.cli.preflight import Preflight, check_environments, check_own_learning, look_ahead, with_steps
from asyncrl.config import JOURNAL_DIR, load_config, run_digest
from asyncrl.learner.memory_plan import (
    MASTER,
    Shape,
    Sizes,
    head_bytes,
    head_rows,
    held,
    on_one_of,
    stacked,
    whole_numbers,
)
from asyncrl.losses.config import required_inputs
from asyncrl.replay.shards.__main__ import shard_config
from asyncrl.rollout.concurrency import sequences_per_engine
from asyncrl.schema import Config
from asyncrl.telemetry.resumed import kept_dtypes
from asyncrl.telemetry.run_folder import changes_in, refuse_used_folder

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Read from the files of a local checkpoint; no tensor is loaded."""

    parameters: int
    kv_values_per_token: int
    """Keys and values of one token over all layers, counted in numbers."""
    shapes: Mapping[str, Shape]
    """As the learner holds them (`memory_plan.stacked`)."""
    sizes: Sizes | None
    matrices: Mapping[str, tuple[int, int]]
    """[out, in] of the weights in the blocks, by the name of their layer; without experts."""

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of LoRA adapters: an estimate, since only the model itself knows which layers are linear."""
        chosen = (
            shape
            for name, shape in self.matrices.items()
            if not targets or any(f".{name}".endswith(f".{target}") for target in targets)
        )
        return sum(rank * (out + into) for out, into in chosen)


def model_size(folder: Path) -> ModelSize | None:
    """None where the checkpoint is not here (a hub name) or not in safetensors that can be read."""
    files = sorted(folder.glob("*.safetensors"))
    config_file = folder / "config.json"
    if not files or not config_file.is_file():
        return None
    try:
        shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
        config = json.loads(config_file.read_text())
    except (ValueError, struct.error):  # the plan of a replay server, whose machine need not hold a whole model
        return None
    matrices = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and re.search(r"\.\d+\.", name) and ".experts." not in name
    }
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints have it twice, the model once
    return ModelSize(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        kv_values_per_token=kv_values(config),
        shapes=stacked(shapes),
        sizes=Sizes.of(config),
        matrices=matrices,
    )


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name, from the header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def kv_values(model: dict[str, Any]) -> int:
    """2 * layers * key-value heads * head dimension, by the names every Hugging Face decoder uses; 0 if unknown."""
    heads = model.get("num_attention_heads") or 0
    if not heads or "num_hidden_layers" not in model:
        return 0
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * head_dim


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def rewarding(config: Config) -> str:
    if not config.reward.function and not config.reward.functions:
        return "which scores by itself"
    shared = "shared by all, in a Ray actor" if config.reward.host == "ray" else "each"
    return f"{config.reward.workers} reward process(es) {shared}"


def process_lines(config: Config, command: str, overrides: Sequence[str]) -> list[str]:
    shards = config.replay.shards
    counts = {
        "replay": "1 process, CPU",
        "shard": f"stores the payloads of every {shards}th group, CPU",
        "rollout": f"{config.rollout.workers} worker(s) as {config.rollout.host}, engine {config.engine.name} on "
        f"{config.engine.device} ({config.engine.dtype}), environment {config.environment.name}, "
        f"{rewarding(config)}",
        "learner": f"{config.learner.ranks} rank(s) under torchrun on {config.learner.device} ({config.model.dtype})"
        f"{', no reference model: its log-probs come with the trajectories' if config.reference.from_rollout else ''}",
    }
    alone = {"replay": replay_command, "rollout": rollout_command}
    if command == "local":
        shown = with_gpus(local_commands(config, overrides, run_id="RUN-ID"), config, gpus_to_plan(config))
    elif command == "shard":
        shown = [shard_command(overrides[0], overrides[1:])]
    elif command == "learner":
        shown = [learner_command(config, overrides, run_id="RUN-ID")]
    else:
        shown = [alone[command](overrides)]
    return [line for each in shown for line in (f"{each.role}: {counts[each.role.partition('-')[0]]}", f"    {each}")]


def support_line(config: Config) -> str:
    """Of truncated sampling: what travels with every token. How many there are is known where the model is here."""
    given = " ".join(f"rollout.{name}={value:g}" for name, value in truncations(config.rollout).items())
    file = Path(config.model.path) / "config.json"
    model = json.loads(file.read_text()) if file.is_file() else {}
    vocabulary = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    most = f", at most {size(4 + math.ceil(vocabulary / 8))} (a bit per token of {vocabulary:,})" if vocabulary else ""
    return f"{given}: with each sampled token goes what it was drawn from, 4 bytes and 4 per token of it{most}"


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
        f"about {most} micro-batches at most of {budget} tokens, {attended} in attention, per rank and optimizer step",
        f"{config.learner.steps} steps = {config.learner.steps * groups} groups, {config.learner.steps * sequences} "
        "sequences",
        *([support_line(config)] if truncations(config.rollout) else []),
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


def journal_line(config: Config) -> str:
    if config.replay.durability == "memory":
        return "replay journal: none (replay.durability=memory): a replay server that dies ends the run"
    journal = config.replay.journal
    kept = {"none": "what recovery needs", "window": f"the newest {journal.window_mb} MiB", "all": "the whole run"}
    folder = Path(config.run.dir) / JOURNAL_DIR
    return f"replay journal: {folder}, files of {journal.segment_mb} MiB; it keeps {kept[journal.retain]}"


def memory_lines(config: Config) -> list[str]:
    lines = [
        f"replay store: {size(store_bytes_needed(config))} of tokens at most, limit {size(config.replay.max_bytes)} "
        f"(replay.max_bytes){f', in {config.replay.shards} shards' if config.replay.shards else ''}",
        journal_line(config),
    ]
    model = model_size(Path(config.model.path))
    if model is None:
        return [
            *lines,
            f"model: {config.model.path} is no local safetensors folder (a hub name?): memory not estimated",
        ]
    count = model.parameters
    if config.model.lora_rank > 0:
        count = model.adapters(config.model.lora_rank, config.model.lora_targets)
    lines += learner_lines(config, model)
    lines += role_lines(config, model.parameters)
    dims = ParallelDims.of(config.learner, config.learner.ranks)
    if config.learner.async_save:
        saved = 12 * (count + (model.parameters if config.advantage.uses_critic else 0))
        saved += 4 * model.parameters if config.learner.proximal_ema > 0 else 0
        lines.append(
            f"learner, per rank: {size(saved / (dims.shard * dims.tensor))} of host memory for the copy that "
            "checkpoints are written from (learner.async_save)"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    running = sequences_per_engine(config)
    width = BYTES[config.engine.dtype]
    lines.append(
        f"rollout worker: {size(width * (model.parameters + count))} weights and staging + "
        f"{kv_cache(config, running * longest * model.kv_values_per_token * width)} ({running} sequences of {longest} "
        "tokens)"
    )
    wire = BYTES[config.weights.wire_dtype] * count
    lines.append(f"a weight update: {size(wire)} per worker over {config.weights.transport}")
    return lines


def learner_lines(config: Config, model: ModelSize) -> list[str]:
    """What the fullest rank holds of the policy, and what comes and goes beside it."""
    dims, width = ParallelDims.of(config.learner, config.learner.ranks), BYTES[config.model.dtype]
    ranks = dims.shard
    cut = on_one_of(model.shapes, dims.tensor)
    shapes, whole, rows = list(cut.values()), model.parameters, list[tuple[int, str]]()
    if config.model.lora_rank > 0:
        base = held(shapes, ranks, width=width, trained=False).weights
        rows.append((base, f"frozen base ({model.parameters:,} parameters), and for adapters:"))
        whole = model.adapters(config.model.lora_rank, config.model.lora_targets)
        shapes = [(whole,)]
    mine, computing = held(shapes, ranks), on_one_of(model.shapes, dims.tensor, computing=True)
    rows.append(
        (
            mine.total,
            f"= {size(mine.weights)} master weights + {size(mine.gradients)} gradients + {size(mine.optimizer)} Adam "
            f"moments ({whole:,} parameters over {dims.shard * dims.tensor} rank(s), each cut along its first dimension"
            f"{' and between those that compute together' if dims.tensor > 1 else ''})",
        )
    )
    setting = config.learner.reduce_gradients
    if setting != "each":
        needed = "" if setting == "last" else ", unless there is no room for it"
        said = f"whole gradient where an optimizer step has several micro-batches{needed}"
        rows.append((4 * sum(math.prod(shape) for shape in shapes), f"{said} (learner.reduce_gradients={setting})"))
    if dims.ranks > 1 or width < MASTER:
        fetched = f"embedding and head, a layer and the next one, in {config.model.dtype}"
        rows.append((width * whole_numbers(computing), f"whole weights while it computes: {fetched}"))
    rows += activation_rows(config, model.sizes and model.sizes.on_one_of(dims.tensor))
    kind = "whole on its one rank" if dims.ranks == 1 and width == MASTER else f"{dims}, layer by layer"
    return [
        f"learner, layout: {kind}; sequences packed, or in rows where the model says so at load",
        *(f"learner, per rank: {size(count)} {what}" for count, what in rows),
        f"learner, per rank: {size(sum(count for count, _ in rows))} of the policy, all of the above",
    ]


def activation_rows(config: Config, sizes: Sizes | None) -> list[tuple[int, str]]:
    """Estimates; none of a model whose config is none of a plain decoder."""
    if sizes is None:
        return []
    width, checkpointing = BYTES[config.model.dtype], config.model.activation_checkpointing
    every, keep = config.model.checkpoint_every, config.model.checkpoint_keep
    tokens = config.learner.max_tokens_per_microbatch
    # More slots than a group's siblings have of it no token has.
    slots = min(config.learner.attention_budget, tokens * config.rollout.group_size)
    other = size(sizes.activations(tokens, slots, width, 0 if checkpointing else every, keep))
    return [
        (
            sizes.activations(tokens, slots, width, every if checkpointing else 0, keep),
            f"activations of a full micro-batch, about ({tokens} tokens, {slots} in attention, {sizes.layers} layers, "
            f"{sizes.hidden} wide; {other} with model.activation_checkpointing={str(not checkpointing).lower()})",
        ),
        (
            head_bytes(sizes.vocabulary, sizes.hidden, width, wide=config.model.fp32_head and width < MASTER),
            f"head, about: {head_rows(sizes.vocabulary)} * {sizes.vocabulary} logits, and its weight's gradient",
        ),
    ]


def role_lines(config: Config, parameters: int) -> list[str]:
    """The learner's other models, of the policy's size unless their own checkpoint is here and says otherwise."""
    dims = ParallelDims.of(config.learner, config.learner.ranks)
    ranks = dims.shard * dims.tensor
    trained = 16 if config.advantage.uses_critic else 0
    in_loss = "ref_logprobs" in required_inputs(config.loss)
    no_model = config.reference.from_rollout or (config.model.lora_rank > 0 and not config.reference.path)
    frozen = 4 if (in_loss or config.advantage.kl_coef > 0) and not no_model else 0
    lines = []
    for role, path, width in (
        ("critic", config.critic.path, trained),
        ("reference", config.reference.path, frozen),
        ("averaged policy", "", 4 if config.learner.proximal_ema > 0 else 0),
    ):
        own = model_size(Path(path)) if path else None
        count = own.parameters if own else parameters
        if width:
            what = "weights, gradients and Adam moments" if width == 16 else "weights"
            lines.append(f"learner, per rank: {size(width * count / ranks)} {what} of the {role}")
    return lines


def kv_cache(config: Config, wanted: int) -> str:
    """What it will be, and with vLLM, which takes what it is given and holds sequences back, what would be wanted."""
    if config.engine.name != "vllm":
        return f"{size(wanted)} KV cache"
    given = size(config.engine.kv_cache_mb << 20) if config.engine.kv_cache_mb else "vLLM's default"
    return f"{given} of KV cache (engine.kv_cache_mb), {size(wanted)} would hold everything"


def learning_lines(config: Config) -> list[str]:
    """Loss and advantage with every part that they use, and the learning rate."""
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
    ]
    if advantage.uses_critic:
        lines.append(f"critic.lr={config.critic.lr:g}")
    return lines


def loss_parts(config: Config) -> list[tuple[str, object]]:
    return [(name, value) for name, value in resolved_loss(config.loss).items() if value is not None]


def plan_text(config: Config, command: str, overrides: Sequence[str], found: Preflight | None = None) -> str:
    """The whole plan, headed by what it belongs to; what `auto` is for GPUs that are here, or planned for."""
    digest = run_digest(config)
    gpus = len(gpus_to_plan(config))
    kinds = ("cuda" if gpus and device != "cpu" else "cpu" for device in (config.learner.device, config.engine.device))
    config = with_dtypes(config, **dict(zip(("learner", "engine"), kinds, strict=True)))
    seen = {} if found is None else {"prompts": found.prompts, "reward": found.reward}
    sections = {
        "processes": process_lines(config, command, overrides),
        **({"placement": placement_lines(config)} if command == "local" else {}),
        **seen,
        "learning": learning_lines(config),
        "batch": batch_lines(config),
        "staleness": staleness_lines(config),
        "memory": memory_lines(config),
    }
    head = [f"run {config.run.name} in {config.run.dir}, settings digest {digest}, seed {config.seed}"]
    for title, lines in sections.items():
        head += [f"\n{title}", *(f"  {line}" for line in lines)]
    return "\n".join([*head, "\ndry run: nothing was started"])


def main(command: str, overrides: Sequence[str]) -> int:
    """Raises ConfigError and RunFolderError as the real start would."""
    config = shard_config(overrides)[1] if command == "shard" else load_config(overrides)
    if command in ("local", "learner", "rollout"):
        overrides = [*overrides, *kept_dtypes(config, overrides)]
        config = load_config(overrides)
    check_machine(config, command, planned=True)
    if command in ("local", "rollout"):
        check_environments(config)
    if command in ("local", "learner"):
        check_own_learning(config)
        refuse_used_folder(config)
        changes_in(config)  # what is no folder to go on in is refused before its rows are looked at
    found = look_ahead(config) if command in ("local", "rollout") else None
    if found and command == "local":
        config, overrides = with_steps(config, overrides, found.rows)
    if command in ("local", "learner"):
        for change in changes_in(config):
            print(f"this resume changes {change}")
    print(plan_text(config, command, overrides, found))
    return 0
