"""For `--dry-run`: estimate whether a learner rank fits its GPU, and if not, find a layout that does. See `memory`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from asyncrl.checks.architecture import longest_sequence
from asyncrl.checks.machine import model_settings, not_laid_out
from asyncrl.checks.parallel import problem_of
from asyncrl.checks.placement import placement_of
from asyncrl.checks.rules.whole import problems_of_rules
from asyncrl.cli.dry_run.memory import copies_bytes, copies_on_gpu, policy_held, rank_bytes, size
from asyncrl.cli.dry_run.model_size import ModelSize
from asyncrl.cli.dry_run.placement import gpus_to_plan, kind_to_plan
from asyncrl.cli.processes.told import smi_says
from asyncrl.learner.memory_plan import reduces_each
from asyncrl.placement import WHOLE_SHARE
from asyncrl.schema import Config

PLANNED_GB = 80.0
"""Memory in GB assumed for a planned GPU that is not on this machine."""
NEIGHBOURS = (2, 4, 8)
"""Numbers of ranks on one machine that are tried for `sequence_parallel` and `tensor_parallel`."""
Changes = dict[str, Any]
"""Setting -> value."""


def fitting_lines(config: Config, model: ModelSize | None, command: str) -> list[str]:
    """State whether a learner rank fits, and if not, the first change of settings with which it does. Empty if the
    learner computes on a CPU, or if the size of its model is unknown.

    Args:
        model: the sizes of its models (`sizes_of`), if they are known.
        command: `local` or `learner`. `asyncrl sft`, which has no engines beside its learner, is like `learner`.
    """
    if kind_to_plan(config, config.learner.device) != "cuda" or problem_of(config.learner, config.learner.ranks):
        return []
    if model is None:
        return []
    whole = gpu_gb()
    room = int(share_of(config, command) * whole * 1e9)
    first = taken(config, model, command, room)
    said = f"learner, on GPUs of {whole:.0f} GB: a rank has {size(room)} and takes at most {size(first)}"
    if first <= room:
        return [f"{said}, which fits"]
    least, least_by = first, ""
    # The rules are those of reinforcement learning, and some of them refuse every `sft.settings.learner_config`.
    accepted = set(problems_of_rules(config))
    for changes in candidates(config):
        tried = changed(config, changes, accepted)
        if tried is None:
            continue
        count = taken(tried, model, command, room)
        by = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        if count <= room:
            return [f"{said}, which does not fit. With {by} it takes {size(count)}, which fits"]
        if count < least:
            least, least_by = count, by
    best = f": it takes {size(least)} with {least_by}" if least_by else ""
    return [f"{said}, which does not fit, and no layout of {config.learner.ranks} rank(s){best}"]


def gpu_gb() -> float:
    """Memory of the smallest GPU on this machine, in GB of 10^9 bytes; `PLANNED_GB` without one."""
    found = []
    for line in (smi_says() or "").splitlines():
        _, *numbers = line.rsplit(",", 3)  # from the right: a name may contain commas
        if len(numbers) == 3 and numbers[0].strip().isdecimal():
            found.append(int(numbers[0]) * 2**20 / 1e9)
    return min(found, default=PLANNED_GB)


def share_of(config: Config, command: str) -> float:
    """Smallest share of a GPU's memory that a learner rank may use."""
    if command != "local":
        return WHOLE_SHARE
    return min((rank.memory for rank in placement_of(config, len(gpus_to_plan(config))).learner), default=WHOLE_SHARE)


def taken(config: Config, model: ModelSize, command: str, memory: int) -> float:
    """Bytes that rank 0 takes, including copies of weights that are being sent if these are on its GPU.

    Args:
        memory: bytes that a rank has, which decide what `learner.reduce_gradients=auto` means.
    """
    learner = config.learner
    trained = model.trained(config.model.lora_rank, config.model.lora_targets) // learner.tensor_parallel
    shards = policy_held(config, model).total
    each = reduces_each(learner.reduce_gradients, shards=shards, trained=trained, memory=memory)
    config = replace(config, learner=replace(learner, reduce_gradients="each" if each else "last"))
    there = copies_on_gpu(config, len(gpus_to_plan(config)), command)
    return rank_bytes(config, model) + (copies_bytes(config, model) if there else 0)


def candidates(config: Config) -> Iterator[Changes]:
    """Yield changes of settings, in the order of their cost in time: activation checkpointing, smaller micro-batches,
    sequence parallelism, tensor parallelism, offloading."""
    again: Changes = {} if config.model.activation_checkpointing else {"model.activation_checkpointing": True}
    budget, longest = config.learner.max_tokens_per_microbatch, longest_sequence(config)
    budgets: list[Changes] = [{}]
    while budget // 2 >= longest:
        budget //= 2
        budgets.append({"learner.max_tokens_per_microbatch": budget})
    layouts: list[Changes] = [{}]
    layouts += [{"learner.sequence_parallel": ranks} for ranks in NEIGHBOURS if config.learner.sequence_parallel == 1]
    layouts += [{"learner.tensor_parallel": ranks} for ranks in NEIGHBOURS if config.learner.tensor_parallel == 1]
    layouts += [{"learner.offload": kind} for kind in ("optimizer", "all") if config.learner.offload == "none"]
    for layout in layouts:
        for smaller in budgets:
            if again or layout or smaller:
                yield {**again, **layout, **smaller}


def changed(config: Config, changes: Changes, accepted: Collection[str] = ()) -> Config | None:
    """Return `config` with changed settings; None if a start would refuse them, for other problems than those that
    `config` is `accepted` with."""
    found = config
    for key, value in changes.items():
        room, _, name = key.partition(".")
        found = replace(found, **{room: replace(getattr(found, room), **{name: value})})
    learner = found.learner
    if problem_of(learner, learner.ranks) or not_laid_out(model_settings(config.model.path), learner, trained=True):
        return None
    return None if set(problems_of_rules(found)).difference(accepted) else found
