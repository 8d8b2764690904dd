"""What each process of a run holds in memory, with the arithmetic."""

from __future__ import annotations

import math
from pathlib import Path

from asyncrl.checks.parallel import ParallelDims, problem_of
from asyncrl.checks.placement import kind_to_plan
from asyncrl.checks.rules.replay import store_bytes_needed
from asyncrl.checks.servers import on_to_servers
from asyncrl.config import JOURNAL_DIR
from asyncrl.learner.memory_plan import (
    MASTER,
    Held,
    Shape,
    Sizes,
    apart,
    head_backward_rows,
    head_bytes,
    held,
    moment_bytes,
    on_one_of,
    whole_numbers,
)
from asyncrl.memory.model_size import ModelSize
from asyncrl.rollout.worker.concurrency import sequences_per_engine
from asyncrl.schema import Config
from asyncrl.settings.loss.meaning import required_inputs

BYTES = {"float32": 4, "bfloat16": 2}
BUCKETS = 4
"""Buckets that rank 0 holds at most while it sends a version."""
OF_TRAINED = ("master weights", "gradients", "Adam moments")
OFFLOADED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": (OF_TRAINED, ()),
    "optimizer": (("master weights", "gradients"), ("Adam moments",)),
    "all": ((), OF_TRAINED),
}
"""By `learner.offload`: what is on the learner's compute device, and what is in host memory."""


def size(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def journal_line(config: Config) -> str:
    if config.replay.durability == "memory":
        return "replay journal: none (replay.durability=memory), so the run ends if the replay server dies"
    journal = config.replay.journal
    kept = {"none": "what recovery needs", "window": f"the newest {journal.window_mb} MiB", "all": "the whole run"}
    folder = Path(config.run.dir) / JOURNAL_DIR
    return f"replay journal: {folder}, files of {journal.segment_mb} MiB; it keeps {kept[journal.retain]}"


def memory_lines(config: Config, model: ModelSize | None) -> list[str]:
    """Return the lines about memory.

    Args:
        model: the sizes of its models (`sizes_of`), if they are known.
    """
    lines = [
        f"replay store: {size(store_bytes_needed(config))} of tokens at most, limit {size(config.replay.max_bytes)} "
        f"(replay.max_bytes)",
        journal_line(config),
        *learner_memory(config, model),
    ]
    if model is None or problem_of(config.learner, config.learner.ranks):
        return lines
    lines.append(f"learner, rank 0: {size(buckets_bytes(config, model))} for buckets of weights that are being sent")
    count = model.trained(config.model.lora_rank, config.model.lora_targets)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    running = sequences_per_engine(config)
    width = BYTES[config.engine.dtype]
    lines.append(
        f"rollout worker: {size(width * (model.parameters + count))} weights and staging + "
        f"{kv_cache(config, running * longest * model.kv_values_per_token * width)} ({running} sequences of {longest} "
        "tokens)"
    )
    wire = BYTES[config.weights.wire_dtype] * count
    on = on_to_servers(config.engine)
    lines.append(f"a weight update: {size(wire)} per worker over {config.weights.transport}{on}")
    return lines


def learner_memory(config: Config, model: ModelSize | None) -> list[str]:
    """Return the lines about a learner rank, or why its memory is not estimated."""
    if model is None:
        return [
            f"model: {config.model.path} is not a local safetensors folder (a hub name?), so memory is not estimated"
        ]
    if problem_of(config.learner, config.learner.ranks):
        return ["learner: memory is not estimated. Give learner.ranks, the number of ranks that you start"]
    lines = learner_lines(config, model)
    lines += [f"learner, per rank: {size(count)} {what}" for count, what in role_rows(config, model)]
    lines += [f"learner, per rank: {size(count)} of host memory: {what}" for count, what in host_rows(config, model)]
    dims = ParallelDims.of(config.learner, config.learner.ranks)
    if config.learner.async_save:
        critic = model.others.get(config.critic.path, model).of_critic if config.advantage.uses_critic else 0
        others = (MASTER + moment_bytes(config.learner.optimizer)) * critic
        others += 4 * model.parameters if config.learner.proximal_ema > 0 else 0
        mine = policy_held(config, model)
        saved = mine.weights + mine.optimizer + others / (dims.shards * dims.tensor)
        lines.append(
            f"learner, per rank: {size(saved)} of host memory for the copy that "
            "checkpoints are written from (learner.async_save)"
        )
    return lines


def rank_bytes(config: Config, model: ModelSize) -> float:
    """Return the bytes of all models and activations on the fullest learner rank, without those that `learner.offload`
    keeps in host memory."""
    return sum(count for count, _ in learner_rows(config, model)) + sum(count for count, _ in role_rows(config, model))


def held_bytes(config: Config, model: ModelSize) -> float:
    """Return the bytes of all models on the fullest learner rank between steps: `rank_bytes` without gradients that are
    not sharded yet, whole weights, activations and the head."""
    return sum(count for count, _ in policy_rows(config, model)[0]) + sum(
        count for count, _ in role_rows(config, model)
    )


def buckets_bytes(config: Config, model: ModelSize) -> int:
    """Return the bytes of the buckets that rank 0 holds while it sends a version, on its GPU or in host memory."""
    width = BYTES[config.weights.wire_dtype]
    largest = max((width * math.prod(shape) for shape in policy_shapes(config, model).values()), default=0)
    whole = width * model.trained(config.model.lora_rank, config.model.lora_targets)
    return min(BUCKETS * max(config.weights.bucket_mb << 20, largest), BUCKETS * whole)


def engine_bytes(config: Config, model: ModelSize) -> int:
    """Return the bytes of weights, staging and one sequence of maximum length: the minimum for an engine."""
    count = model.trained(config.model.lora_rank, config.model.lora_targets)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    width = BYTES[config.engine.dtype]
    return width * (model.parameters + count + longest * model.kv_values_per_token)


def learner_rows(config: Config, model: ModelSize) -> list[tuple[int, str]]:
    """Return the bytes of the policy on the compute device of the fullest rank, and those that are temporary."""
    dims, width = ParallelDims.of(config.learner, config.learner.ranks), BYTES[config.model.dtype]
    rows = policy_rows(config, model)[0]
    computing = apart(on_one_of(model.shapes, dims.tensor, computing=True), dims.expert)
    setting = config.learner.reduce_gradients
    if setting != "each":
        needed = "" if setting == "last" else ", unless there is no room for it"
        said = f"whole gradient where an optimizer step has several micro-batches{needed}"
        rows.append(
            (
                MASTER * sum(map(math.prod, apart(policy_shapes(config, model), dims.expert).values())),
                f"{said} (learner.reduce_gradients={setting})",
            )
        )
    if dims.ranks > 1 or width < MASTER or config.learner.offload == "all":
        fetched = f"embedding and head, one layer and the next, in {config.model.dtype}"
        rows.append((width * whole_numbers(computing), f"whole weights while it computes: {fetched}"))
    return rows + activation_rows(config, model.sizes and model.sizes.on_one_of(dims.tensor), dims.sequence)


def policy_shapes(config: Config, model: ModelSize) -> dict[str, Shape]:
    """Return the shapes of the trained tensors, before FSDP2 shards them."""
    chosen = config.model
    whole = model.adapters(chosen.lora_rank, chosen.lora_targets) if chosen.lora_rank > 0 else model.shapes
    return on_one_of(whole, ParallelDims.of(config.learner, config.learner.ranks).tensor)


def policy_held(config: Config, model: ModelSize) -> Held:
    learner = config.learner
    shards = ParallelDims.of(learner, learner.ranks).shards
    return held(policy_shapes(config, model).values(), shards, optimizer=learner.optimizer)


def policy_rows(config: Config, model: ModelSize) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Return what the fullest rank holds of the policy between steps: on the compute device, and in host memory."""
    dims, offload, mine = (
        ParallelDims.of(config.learner, config.learner.ranks),
        config.learner.offload,
        policy_held(config, model),
    )
    there: list[tuple[int, str]] = []
    here: list[tuple[int, str]] = []
    if config.model.lora_rank > 0:
        base = held(
            on_one_of(model.shapes, dims.tensor).values(), dims.shards, width=BYTES[config.model.dtype], trained=False
        )
        row = base.weights, f"frozen base ({model.parameters:,} parameters), and for adapters:"
        (there if offload == "all" else here).append(row)
    together = " and between those that compute together" if dims.tensor > 1 else ""
    whole = model.trained(config.model.lora_rank, config.model.lora_targets)
    cut = (
        f"({whole:,} parameters over {dims.shards * dims.tensor} rank(s), each cut along its first dimension{together})"
    )
    parts = {"master weights": mine.weights, "gradients": mine.gradients, "Adam moments": mine.optimizer}
    for rows, names in zip((here, there), OFFLOADED[offload], strict=True):
        if names:
            said = " + ".join(f"{size(parts[name])} {name}" for name in names)
            rows.append((sum(parts[name] for name in names), f"= {said} {cut}"))
    return here, there


def host_rows(config: Config, model: ModelSize) -> list[tuple[float, str]]:
    """Return what `learner.offload` keeps in host memory."""
    found: list[tuple[float, str]] = [
        *policy_rows(config, model)[1],
        *role_rows(config, model, on_host=True),
    ]
    return [(count, f"{what} (learner.offload={config.learner.offload})") for count, what in found]


def learner_lines(config: Config, model: ModelSize) -> list[str]:
    dims, width = ParallelDims.of(config.learner, config.learner.ranks), BYTES[config.model.dtype]
    rows = learner_rows(config, model)
    whole = dims.ranks == 1 and width == MASTER and config.learner.offload != "all"
    kind = "whole on its one rank" if whole else f"{dims}, layer by layer"
    return [
        f"learner, layout: {kind}; sequences packed, or in rows if the model needs it (known when it is loaded)",
        *(f"learner, per rank: {size(count)} {what}" for count, what in rows),
        f"learner, per rank: {size(sum(count for count, _ in rows))} for the policy, all of the above",
    ]


def activation_rows(config: Config, sizes: Sizes | None, sequence: int) -> list[tuple[int, str]]:
    """Estimate activations; empty for a model whose config is not that of a plain decoder.

    Args:
        sequence: number of ranks that share each micro-batch: its tokens, and in attention its heads, which is the same
            number of elements.
    """
    if sizes is None:
        return []
    width, checkpointing = BYTES[config.model.dtype], config.model.activation_checkpointing
    device, wide = kind_to_plan(config, config.learner.device), config.model.fp32_head and width < MASTER
    every, keep = config.model.checkpoint_every, config.model.checkpoint_keep
    tokens = config.learner.max_tokens_per_microbatch
    # A token cannot have more attention slots than the members of a group that share it.
    slots = min(config.learner.attention_budget, tokens * config.rollout.group_size) // sequence
    tokens, part = -(-tokens // sequence), f"1 / {sequence} of " if sequence > 1 else ""
    other = size(sizes.activations(tokens, slots, width, 0 if checkpointing else every, keep))
    return [
        (
            sizes.activations(tokens, slots, width, every if checkpointing else 0, keep),
            f"activations of {part}a full micro-batch, about ({tokens} tokens, {slots} in attention, "
            f"{sizes.layers} layers, {sizes.hidden} wide; {other} with "
            f"model.activation_checkpointing={str(not checkpointing).lower()}"
            + (", all as without model.compile)" if config.model.compile else ")"),
        ),
        (
            head_bytes(sizes.vocabulary, sizes.hidden, width, device, tokens, wide=wide),
            f"head, about: {min(tokens, head_backward_rows(sizes.vocabulary, device))} * {sizes.vocabulary} logits, "
            "and its weight's gradient",
        ),
    ]


def role_rows(config: Config, model: ModelSize, *, on_host: bool = False) -> list[tuple[float, str]]:
    """Return the bytes per rank of the learner's other models.

    Args:
        on_host: those that `learner.offload` keeps in host memory; otherwise those on the compute device.
    """
    dims = ParallelDims.of(config.learner, config.learner.ranks)
    ranks = dims.shards * dims.tensor
    widths = {"master weights": MASTER, "gradients": MASTER, "Adam moments": moment_bytes(config.learner.optimizer)}
    in_loss = "ref_logprobs" in required_inputs(config.loss)
    no_model = config.reference.from_rollout or (config.model.lora_rank > 0 and not config.reference.path)
    reference = (in_loss or config.advantage.kl_coef > 0) and not no_model
    rows = []
    for role, path, there in (
        ("critic", config.critic.path, config.advantage.uses_critic),
        ("reference", config.reference.path, reference),
        ("averaged policy", "", config.learner.proximal_ema > 0),
    ):
        own = model.others.get(path, model)
        count = own.of_critic if role == "critic" else own.parameters
        names = OFFLOADED[config.learner.offload][on_host]
        kept = {name: widths[name] for name in names if role == "critic" or name == "master weights"}
        if role == "reference" and there and kept:
            kept = {"weights": BYTES[config.model.dtype]}
        if there and kept:
            rows.append((sum(kept.values()) * count / ranks, f"{' + '.join(kept)} of the {role}"))
    return rows


def kv_cache(config: Config, wanted: int) -> str:
    """Return the size of the KV cache. vLLM uses the given size and delays sequences that do not fit, so for it the
    size for all sequences is added."""
    if config.engine.name != "vllm":
        return f"{size(wanted)} KV cache"
    given = size(config.engine.kv_cache_mb << 20) if config.engine.kv_cache_mb else "vLLM's default"
    return f"{given} of KV cache (engine.kv_cache_mb), {size(wanted)} would hold all sequences"
