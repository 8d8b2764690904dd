"""`--dry-run`: what would be started, and the arithmetic that decides if it fits. Starts nothing, loads no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.checks.replay import store_bytes_needed
from asyncrl.commands import learner_command, local_commands, replay_command, rollout_command
from asyncrl.config import Config, load_config, run_digest
from asyncrl.machine import check_machine
from asyncrl.telemetry.run_folder import refuse_used_folder

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Read from the files of a local checkpoint; no tensor is loaded."""

    parameters: int
    kv_values_per_token: int
    """Keys and values of one token over all layers, counted in numbers."""


def model_size(folder: Path) -> ModelSize | None:
    """None where the checkpoint is not here (a hub name) or not in safetensors that can be read."""
    files = sorted(folder.glob("*.safetensors"))
    config_file = folder / "config.json"
    if not files or not config_file.is_file():
        return None
    try:
        parameters = sum(math.prod(shape) for file in files for shape in tensor_shapes(file))
        values = kv_values(json.loads(config_file.read_text()))
    except (ValueError, struct.error):  # the plan of a replay server, whose machine need not hold a whole model
        return None
    return ModelSize(parameters=parameters, kv_values_per_token=values)


def tensor_shapes(file: Path) -> list[list[int]]:
    """Shapes from the header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(length))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


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


def process_lines(config: Config, command: str, overrides: Sequence[str]) -> list[str]:
    counts = {
        "replay": "1 process, CPU",
        "rollout": f"{config.rollout.workers} worker(s) as {config.rollout.host}, engine {config.engine.name} on "
        f"{config.engine.device} ({config.engine.dtype}), {config.reward.workers} reward process(es) each",
        "learner": f"{config.learner.ranks} rank(s) under torchrun on {config.learner.device} ({config.model.dtype})",
    }
    alone = {"replay": replay_command, "rollout": rollout_command}
    if command == "local":
        shown = local_commands(config, overrides, run_id="RUN-ID")
    elif command == "learner":
        shown = [learner_command(config, overrides, run_id="RUN-ID")]
    else:
        shown = [alone[command](overrides)]
    return [line for each in shown for line in (f"{each.role}: {counts[each.role]}", f"    {each}")]


def batch_lines(config: Config) -> list[str]:
    groups, members = config.learner.groups_per_step, config.rollout.group_size
    sequences = groups * members
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = sequences * longest
    budget = config.learner.max_tokens_per_microbatch
    per_rank = math.ceil(tokens / config.learner.updates_per_batch / config.learner.ranks)
    return [
        f"a step trains {groups} groups * {members} = {sequences} sequences, in {config.learner.updates_per_batch} "
        "optimizer step(s)",
        f"at most {sequences} * ({config.data.max_prompt_tokens} prompt + {config.rollout.max_new_tokens} new) = "
        f"{tokens} tokens",
        f"at most {math.ceil(per_rank / max(1, budget - longest + 1))} micro-batches of {budget} tokens per rank and "
        "optimizer step",
        f"{config.learner.steps} steps = {config.learner.steps * groups} groups, {config.learner.steps * sequences} "
        "sequences",
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


def memory_lines(config: Config) -> list[str]:
    lines = [
        f"replay store: {size(store_bytes_needed(config))} of tokens at most, limit {size(config.replay.max_bytes)} "
        "(replay.max_bytes)"
    ]
    model = model_size(Path(config.model.path))
    if model is None:
        return [
            *lines,
            f"model: {config.model.path} is no local safetensors folder (a hub name?): memory not estimated",
        ]
    ranks, count = config.learner.ranks, model.parameters
    lines.append(
        f"learner, per rank: {size(4 * count / ranks)} master weights + {size(4 * count / ranks)} gradients + "
        f"{size(8 * count / ranks)} Adam moments ({count:,} parameters over {ranks} rank(s)); activations not estimated"
    )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    running = min(
        config.engine.max_sequences,
        math.ceil(config.rollout.max_in_flight / config.rollout.workers) * config.rollout.group_size,
    )
    width = BYTES[config.engine.dtype]
    lines.append(
        f"rollout worker: {size(2 * width * count)} weights and staging + "
        f"{size(running * longest * model.kv_values_per_token * width)} KV cache "
        f"({running} sequences of {longest} tokens)"
    )
    wire = BYTES[config.weights.wire_dtype] * count
    lines.append(f"a weight update: {size(wire)} per worker over {config.weights.transport}")
    return lines


def plan_text(config: Config, command: str, overrides: Sequence[str]) -> str:
    """The whole plan, headed by what it belongs to."""
    sections = {
        "processes": process_lines(config, command, overrides),
        "batch": batch_lines(config),
        "staleness": staleness_lines(config),
        "memory": memory_lines(config),
    }
    head = [f"run {config.run.name} in {config.run.dir}, settings digest {run_digest(config)}, seed {config.seed}"]
    for title, lines in sections.items():
        head += [f"\n{title}", *(f"  {line}" for line in lines)]
    return "\n".join([*head, "\ndry run: nothing was started"])


def main(command: str, overrides: Sequence[str]) -> int:
    """Raises ConfigError and RunFolderError as the real start would."""
    config = load_config(overrides)
    check_machine(config, command)
    if command in ("local", "learner"):
        refuse_used_folder(config)
    print(plan_text(config, command, overrides))
    return 0
