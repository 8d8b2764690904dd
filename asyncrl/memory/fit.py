"""Whether a learner rank fits its GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.parallel import problem_of
from asyncrl.checks.placement import gpus_to_plan, kind_to_plan, placement_of
from asyncrl.checks.programs import nvidia_smi
from asyncrl.errors import ConfigError
from asyncrl.learner.memory_plan import reduces_each
from asyncrl.memory.model_size import ModelSize, sizes_of
from asyncrl.memory.usage import buckets_bytes, held_bytes, policy_held, rank_bytes, size
from asyncrl.placement import WHOLE_SHARE
from asyncrl.schema import Config

PLANNED_GB = 80.0
"""Memory in GB assumed for a planned GPU that is not on this machine."""
LESS = (
    "model.activation_checkpointing=true, a lower learner.max_tokens_per_microbatch, learner.sequence_parallel, "
    "learner.tensor_parallel, learner.offload, or more learner.ranks"
)
"""What lowers the memory of a rank, in the order of its cost in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory of a learner rank, in bytes."""

    gpu_gb: float
    """Memory of its GPU, in GB of 10^9 bytes."""
    available: int
    """What the rank may use of it."""
    needed: float
    """At most, with activations and the head, which are estimates."""
    held: float = 0.0
    """Of `needed`, what the models take between and beside the steps: weights, gradients, moments, other models."""

    @property
    def possible(self) -> bool:
        """Whether what the models hold fits; a step that does not is repeated with half the micro-batch."""
        return self.held <= self.available

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def __str__(self) -> str:
        said = (
            f"learner, on GPUs of {self.gpu_gb:.0f} GB: a rank has {size(self.available)} and takes at most "
            f"{size(self.needed)}, which"
        )
        return f"{said} fits" if self.fits else f"{said} does not fit. Less takes: {LESS}"


def rank_fit(config: Config, model: ModelSize | None, command: str) -> Fit | None:
    """Return what a learner rank has and needs; None if the learner computes on a CPU, its layout is not known yet, or
    the size of its model is unknown.

    Args:
        model: the sizes of its models (`sizes_of`), if they are known.
        command: `local`, `learner`, or `sft`, which has no engines.
    """
    if model is None or kind_to_plan(config, config.learner.device) != "cuda":
        return None
    if problem_of(config.learner, config.learner.ranks):
        return None
    whole = gpu_gb()
    available = int(share_of(config, command) * whole * 1e9)
    return Fit(
        gpu_gb=whole,
        available=available,
        needed=taken(config, model, available, sends=command != "sft"),
        held=held_bytes(config, model),
    )


def refuse_unfit(config: Config, command: str) -> list[str]:
    """Return a line if a learner rank may not fit its GPU; see `rank_fit`. Reads the model's files only if the learner
    computes on a GPU.

    Raises:
        ConfigError: the models alone do not fit, whatever the micro-batch.
    """
    kind = kind_to_plan(config, config.learner.device)
    if kind != "cuda":
        return []
    config = with_dtypes(config, learner=kind)
    fit = rank_fit(config, sizes_of(config), command)
    if fit is None or fit.fits:
        return []
    if fit.possible:
        return [f"{fit}. The activations in it are an estimate, so the run starts"]
    raise ConfigError(
        f"learner, on GPUs of {fit.gpu_gb:.0f} GB: a rank has {size(fit.available)}, and its models alone take "
        f"{size(fit.held)} between steps. Give more learner.ranks, {lighter(config)}, or a smaller model"
    )


def lighter(config: Config) -> str:
    """What lowers the memory that a rank's models take, in words; only what is not set."""
    learner = config.learner
    ways = (
        ("learner.offload=optimizer or all", learner.offload == "none"),
        ("learner.offload=all", learner.offload == "optimizer"),
        ("learner.optimizer=adamw_8bit", learner.optimizer == "adamw"),
        ("model.lora_rank (adapters instead of all weights)", config.model.lora_rank == 0),
    )
    return ", ".join(way for way, left in ways if left)


def fitting_lines(config: Config, model: ModelSize | None, command: str) -> list[str]:
    """State whether a learner rank fits; empty if that is unknown, see `rank_fit`."""
    fit = rank_fit(config, model, command)
    return [] if fit is None else [str(fit)]


def gpu_gb() -> float:
    """Memory of the smallest GPU on this machine, in GB of 10^9 bytes; `PLANNED_GB` without one."""
    found = []
    for line in (nvidia_smi() or "").splitlines():
        _, *numbers = line.rsplit(",", 3)  # from the right: a name may contain commas
        if len(numbers) == 3 and numbers[0].strip().isdecimal():
            found.append(int(numbers[0]) * 2**20 / 1e9)
    return min(found, default=PLANNED_GB)


def share_of(config: Config, command: str) -> float:
    """Smallest share of a GPU's memory that a learner rank may use."""
    if command != "local":
        return WHOLE_SHARE
    return min((rank.memory for rank in placement_of(config, len(gpus_to_plan(config))).learner), default=WHOLE_SHARE)


def taken(config: Config, model: ModelSize, memory: int, *, sends: bool = True) -> float:
    """Bytes that rank 0 takes, including buckets of weights that are being sent.

    Args:
        memory: bytes that a rank has, which decide what `learner.reduce_gradients=auto` means.
        sends: whether there are engines that get the weights.
    """
    learner = config.learner
    trained = model.trained(config.model.lora_rank, config.model.lora_targets) // learner.tensor_parallel
    shards = policy_held(config, model).total
    each = reduces_each(learner.reduce_gradients, shards=shards, trained=trained, memory=memory)
    config = replace(config, learner=replace(learner, reduce_gradients="each" if each else "last"))
    return rank_bytes(config, model) + (buckets_bytes(config, model) if sends else 0)
