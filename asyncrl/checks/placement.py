"""Determines which of this machine's GPUs a run needs, and which each of its processes gets (`asyncrl.placement`)."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import which

from asyncrl.checks.evaluations import served_rewards
from asyncrl.checks.parallel import ranks_step
from asyncrl.checks.servers import SERVERS
from asyncrl.errors import ConfigError
from asyncrl.placement import Demand, Placement, blocks, engine_share, place
from asyncrl.schema import Config

NVIDIA, AMD = Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd")
DEVICES, MOUNTS = Path("/dev"), Path("/proc/mounts")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SMI_S = 30.0
"""Longest time for nvidia-smi, which takes seconds where no process keeps the driver loaded."""
KINDS = (r"\d+", r"GPU-.+", r"MIG-.+")
"""Kinds of names in CUDA_VISIBLE_DEVICES; all names in a list must be of the first one's kind."""
NONE = ("", "-1", "NoDevFiles", "none", "void")
"""Values by which users and schedulers specify no GPU."""


def visible_gpus() -> tuple[str, ...] | None:
    """Return the GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES; None if that cannot be determined
    without loading torch."""
    names = _exported()
    if names is not None:
        seen = _before_the_end(names)
        return seen if len(set(seen)) == len(seen) else ()  # if one is named twice, CUDA sees none
    if AMD.exists():
        return None
    return tuple(map(str, range(_here())))


def gpus_to_plan(config: Config) -> Sequence[str]:
    """Return the GPUs of this machine, or as many as `placement.gpus` if that is more."""
    visible = visible_gpus() or ()
    return visible if config.placement.gpus <= len(visible) else tuple(map(str, range(config.placement.gpus)))


def kind_to_plan(config: Config, device: str) -> str:
    """Return `cuda` or `cpu`: on which a process with the setting `device` computes on the planned machine."""
    return "cuda" if device != "cpu" and gpus_to_plan(config) else "cpu"


def _here() -> int:
    """Number of NVIDIA GPUs of this machine. In a container the driver may list those of the whole machine, and then
    only the device files of its own are there. Outside, files are made when they are first needed, some before others,
    so that a machine of eight GPUs may have one after its start. In a sandbox (gVisor) only the device files are there,
    and under WSL2 neither: then nvidia-smi is asked."""
    files = sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in DEVICES.iterdir())
    if not NVIDIA.is_dir():
        return files or _listed_by(which("nvidia-smi") or "")
    listed = len(list(NVIDIA.iterdir()))
    return min(listed, files) if files and _has_own_devices() else listed


@cache
def _listed_by(smi: str) -> int:
    """Number of GPUs that this nvidia-smi lists; 0 if it fails, or there is none."""
    try:
        done = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=SMI_S) if smi else None
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE)) if done and not done.returncode else 0


def _has_own_devices() -> bool:
    """Whether /dev is not the kernel's own (devtmpfs), as in a container."""
    kinds = [line.split()[2] for line in MOUNTS.read_text().splitlines() if line.split()[1] == "/dev"]
    return kinds[-1:] != ["devtmpfs"]


def _exported() -> list[str] | None:
    chosen = os.environ.get(VISIBLE)
    return None if chosen is None else [name.strip() for name in chosen.split(",")]


def _before_the_end(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that CUDA reads: up to the first that is invalid, of another kind than the first, or of a GPU
    that does not exist."""
    kind = next((kind for kind in KINDS if re.fullmatch(kind, names[0])), "")
    here = _here() or (0 if NVIDIA.is_dir() else math.inf)

    def counts(name: str) -> bool:
        return re.fullmatch(kind, name) is not None and not (name.isdecimal() and int(name) >= here)

    return tuple(itertools.takewhile(counts, names)) if kind else ()


def unplaced_gpus(torch_sees: int) -> str:
    """Return why a process whose torch sees so many GPUs must not go on; empty if all were seen before torch was
    loaded. Others were given to no process: learner and engines would all take the first."""
    visible = visible_gpus()
    if visible is None or torch_sees <= len(visible):
        return ""
    numbers = ",".join(map(str, range(torch_sees)))
    return (
        f"torch sees {torch_sees} GPUs and asyncrl {len(visible)} (neither {NVIDIA}, device files nor nvidia-smi -L "
        f"show more), so it would place nothing on the others. Set {VISIBLE}={numbers}, or the device settings to cpu"
    )


def misread_gpus(config: Config) -> Iterator[str]:
    """Report names in CUDA_VISIBLE_DEVICES that CUDA does not see: a run would use fewer GPUs, or the CPU."""
    names = _exported() or []
    seen = _before_the_end(names or [""])
    given = f"{VISIBLE}={os.environ.get(VISIBLE)}"
    if len(set(seen)) < len(seen):
        yield f"{given} names a GPU twice, and then CUDA sees none. Set {VISIBLE}={','.join(dict.fromkeys(seen))}"
    elif lost := [name for name in names[len(seen) :] if name not in NONE]:
        why = _why_not(names[len(seen)], names[0])
        yield (
            f"{given}: {why}, so CUDA sees {','.join(seen) or 'no GPU'} and not {','.join(lost)}. Set {VISIBLE} to "
            "GPUs of this machine, by their numbers (0,1) or all by their UUIDs (nvidia-smi -L), or to -1 for none"
        )
    wide = {"learner.ranks": config.learner.ranks, "engine.tensor_parallel": config.engine.tensor_parallel}
    for key, count in wide.items() if seen and seen[0].startswith("MIG-") else ():
        if count > 1:
            yield (
                f"{key}={count} on {given}: a process can only see the first MIG instance. Set {key}=1, or use whole "
                "GPUs"
            )


def _why_not(name: str, first: str) -> str:
    if name in NONE:
        return f"its list ends at {name!r}"
    if name.isdecimal() and first.isdecimal():
        return f"this machine has no GPU {name}"
    kinds = any(re.fullmatch(kind, name) for kind in KINDS)
    return f"{name!r} is of another kind than {first!r}" if kinds else f"{name!r} is the name of no GPU"


def gpus_seen() -> str:
    """Return ` of CUDA_VISIBLE_DEVICES=...` for the message of a starting process; empty if it is not set."""
    return f" of {VISIBLE}={os.environ[VISIBLE]}" if os.environ.get(VISIBLE) else ""


PLACED = ("auto", "cuda")
"""Values of device settings for which asyncrl chooses the GPU."""


def on_gpus(config: Config) -> bool:
    """Return whether engines use the GPUs that they find. Those of servers are not assigned by asyncrl."""
    return config.engine.device in PLACED and config.engine.name not in ("fake", *SERVERS)


def demand_of(config: Config) -> Demand:
    """Return the demand for GPUs on the machine on which `asyncrl local` runs. Processes with a numbered device
    (`cuda:1`) are not placed, and nothing is known about engines on another Ray cluster."""
    learner, on_ray = config.learner, config.rollout.host == "ray"
    engines_here = on_gpus(config) and not (on_ray and config.ray.address)
    served = config.reward.host == "ray" and not config.ray.address
    return Demand(
        ranks=learner.ranks if learner.device in PLACED else 0,
        ranks_step=ranks_step(learner),
        engines=config.rollout.workers if engines_here else 0,
        tensor_parallel=config.engine.tensor_parallel,
        # Only Ray keeps several GPUs for a worker; plain workers that share one are told so by the same setting.
        reserved=config.ray.gpus_per_worker if on_ray else min(1.0, config.ray.gpus_per_worker),
        rewards=config.reward.gpus if served else 0.0,
        reward_services=len(served_rewards(config)) if served else 1,
    )


def gpus_of_rewards(config: Config) -> int:
    """Return the number of whole GPUs for rewards: the reward service shares none with an engine."""
    return demand_of(config).reward_gpus


def placement_of(config: Config, seen: int) -> Placement:
    """Return the placement of a run on this machine, which has `seen` GPUs. Without GPUs, seen or requested by
    `placement.gpus`, no process gets one.

    Raises:
        ConfigError: the processes do not fit.
    """
    gpus = config.placement.gpus or seen
    return place(gpus, demand_of(config), config.placement.mode) if gpus else Placement(mode="cpu")


def impossible_placement(config: Config, seen: int) -> Iterator[str]:
    """Report why this run cannot have its GPUs here."""
    if config.placement.gpus > seen:
        yield (
            f"placement.gpus={config.placement.gpus}, but this machine has {seen}. Leave it out, or add --dry-run to "
            "plan for such a machine"
        )
        return
    try:
        placement = placement_of(config, seen)
    except ConfigError as error:
        yield str(error)
        return
    yield from out_of_sight(config, placement)
    if config.weights.backend == "nccl" and (shared := met_twice(config, placement)):
        yield (
            f"weights.backend=nccl refuses two members on one GPU, and GPU {shared[0]} would have them. Leave "
            "weights.backend out, or give learner and engines GPUs of their own"
        )


def met_twice(config: Config, placement: Placement) -> list[int]:
    """Return the GPUs that would have two members of the weights' group: learner rank 0, which sends, and engines."""
    ranks = placement.learner_gpus or _numbered(config.learner.device)
    engines = [gpu for engine in placement.engines for gpu in engine.gpus]
    if not engines and not config.ray.address:
        engines = [*_numbered(config.engine.device)] * config.rollout.workers
    members = [*ranks[:1], *engines]
    return sorted({gpu for gpu in members if members.count(gpu) > 1})


def _numbered(device: str) -> tuple[int, ...]:
    """Return the number of a device that asyncrl does not place."""
    return (int(device.partition(":")[2]),) if device.startswith("cuda:") else ()


def out_of_sight(config: Config, placement: Placement) -> Iterator[str]:
    """Report engines that cannot open the learner's memory: a process opens only memory of GPUs that it sees."""
    if config.weights.backend != "ipc" or not placement.learner or not placement.engines:
        return
    sender = placement.learner_gpus[0]
    # Ray chooses among the GPUs of the pool.
    narrow = config.rollout.host == "ray" and len(placement.rollout_gpus) > len(placement.engines[0].gpus)
    for engine in placement.engines:
        if narrow or sender not in engine.gpus:
            yield (
                f"weights.backend=ipc: {engine.name} copies the weights out of the memory of GPU "
                f"{sender}, and sees only {'one of' if narrow else 'GPU'} "
                f"{', '.join(map(str, placement.rollout_gpus if narrow else engine.gpus))}. Leave weights.backend out "
                "(nccl between GPUs of their own, else sockets), or use one GPU for all"
            )
            return


def named(gpus: Sequence[int], visible: Sequence[str]) -> str:
    """Return a value for CUDA_VISIBLE_DEVICES. `gpus` are indices into `visible`, which may have UUIDs."""
    return ",".join(visible[gpu] for gpu in gpus)


def gpus_per_engine(config: Config, gpus: int) -> float:
    """Return the number of GPUs that Ray, which has `gpus`, reserves for each rollout worker. On another cluster, whose
    GPUs are also used by others, workers share none.

    Raises:
        ConfigError: the pool's engines and reward services do not fit.
    """
    if config.ray.gpus_per_worker > 0 or not gpus or not on_gpus(config):
        return config.ray.gpus_per_worker
    if config.ray.address:
        return float(config.engine.tensor_parallel)
    return engine_share(gpus, pool_demand(config))


def pool_demand(config: Config) -> Demand:
    """Return what a rollout pool wants from the GPUs of its machine."""
    return replace(demand_of(config), ranks=0)


def worker_gpus(config: Config, visible: Sequence[str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each worker that is a plain process; under Ray, Ray sets it. Empty: the worker
    sees what the pool sees."""
    if config.rollout.host != "process" or not visible or not on_gpus(config):
        return [""] * config.rollout.workers
    engine_share(len(visible), pool_demand(config))  # raises if they cannot be shared
    taken = blocks(len(visible), config.rollout.workers, config.engine.tensor_parallel)
    return [named(block, visible) for block in taken]
