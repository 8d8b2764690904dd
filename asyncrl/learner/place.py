"""A rank of the learner, in a run or in a rerun of it: where it computes, and whom it meets."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from transformers.utils import logging as transformers_logging

from asyncrl.checks.addresses import OF_THE_RANKS, interface_of, is_loopback, own_address
from asyncrl.checks.parallel import ParallelDims, problem_of
from asyncrl.checks.settings import one_device_for_all
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp2 import FSDP2
from asyncrl.learner.ranks import barrier, train_apart
from asyncrl.schema import Config
from asyncrl.storage.log_stream import keep_logging

ROOM = 0.5
"""Share of a rank's memory that one kind of tensors may be planned to take: shards and gradients, or scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank this is, and on what it computes."""

    rank: int
    world: int
    device: torch.device
    restarted: bool
    """The ranks were started again after one of them, or their torchrun, died. After machines joined or left this does
    not say so (`Checkpoints.begun`)."""
    run_id: str
    """The run whose folder this is; the same for all restarts."""

    @classmethod
    def of(cls, environment: Mapping[str, str], device: str) -> Place:
        """From what torchrun sets. `device` is `learner.device`: `auto`, `cpu`, `cuda` or `cuda:N`.

        Raises:
            ConfigError: a GPU is asked for where there is none, or one for several ranks.
        """
        here = int(environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1")))
        if ":" in device and here > 1:
            raise ConfigError(one_device_for_all(device, here))
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"learner.device={device}, but torch sees no GPU here. Use learner.device=auto or cpu")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        local = int(environment.get("LOCAL_RANK", "0"))
        # torchrun without --rdzv-id names every run "none"; its own process is what lasts over restarts then.
        named = environment.get("TORCHELASTIC_RUN_ID", uuid.uuid4().hex[:12])
        return cls(
            rank=int(environment.get("RANK", "0")),
            world=int(environment.get("WORLD_SIZE", "1")),
            device=torch.device(kind, local) if kind == "cuda" else torch.device(kind),
            # By torchrun after the death of a rank, or by `asyncrl local` after torchrun's own.
            restarted=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or "ASYNCRL_RESTARTED" in environment,
            run_id=f"{socket.gethostname()}-{os.getppid()}" if named == "none" else named,
        )


def prepare_process(place: Place, level: int, share: float = 1.0) -> None:
    """Logging, threads, device and precision of this rank.

    Args:
        level: of the log.
        share: of its GPU's memory that it may take. What is over it is out of memory, as if the GPU had no more.
    """
    keep_logging()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    # Said at every gather of a weight that tensor parallelism and FSDP2 have both cut: few, and not in the step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said at every checkpoint of one rank
    if place.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(place.device)
        torch.cuda.set_per_process_memory_fraction(share, place.device)
    # float32 is float32, in log-ratios that are compared with an engine's: TF32 keeps 10 bits of a factor. torch has it
    # on for convolutions unless it is told.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def memory_of(device: torch.device, ranks: int) -> int:
    """Bytes of the GPU that this process may take; without one an even share of this machine's, as if all ranks were
    on it."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return int(whole * torch.cuda.get_per_process_memory_fraction(device))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def group_interfaces(environment: Mapping[str, str], weights_host: str, weights_interface: str = "") -> dict[str, str]:
    """Variables that hold gloo and nccl to loopback, where all ranks are on this machine, and gloo to the interface
    that leads to rank 0 (MASTER_ADDR) where they are not.

    Without them both listen wherever the machine's own name leads: to itself, by what many have in /etc/hosts. nccl has
    one for all groups of a process, so it is `weights.interface`, and without that left alone where the weights go to
    other machines.
    """
    master = environment.get("MASTER_ADDR", "127.0.0.1")
    inside = is_loopback(master)
    leads = "lo" if inside else _interface_towards(master)
    held = {"GLOO_SOCKET_IFNAME": leads} if leads else {}
    if weights_interface:
        held["NCCL_SOCKET_IFNAME"] = weights_interface
    elif inside and is_loopback(weights_host):
        held["NCCL_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in held.items() if name not in environment}


def _interface_towards(host: str) -> str:
    """Empty where there is none, or none that is known."""
    try:
        return interface_of(own_address(host))
    except OSError:
        return ""


def join_ranks(config: Config, place: Place) -> FSDP2:
    """The process group of the ranks, of one rank too: the same code then runs everywhere.

    Its deadline covers what rank 0 may do alone while the others wait in a collective: wait for a batch, for the
    engines to acknowledge weights, write a checkpoint, wait for space on a full disk.

    Raises:
        ConfigError: so many ranks cannot be laid out as the settings say.
    """
    alone_s = config.replay.wait_timeout_s + 10 * config.weights.timeout_s + config.run.disk_patience_s + 60
    patience = timedelta(seconds=alone_s)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    held = group_interfaces(os.environ, config.weights.host, config.weights.interface)
    os.environ.update(held | {OF_THE_RANKS: held.get("GLOO_SOCKET_IFNAME", "")})
    if place.world == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
    else:
        dist.init_process_group(backend, timeout=patience)
    return backend_of(config, place)


def backend_of(config: Config, place: Place) -> FSDP2:
    """The ranks as `config.learner` lays them out. Collective.

    Raises:
        ConfigError: so many ranks cannot be.
    """
    if problem := problem_of(config.learner, place.world, "the number of ranks"):
        raise ConfigError(problem)
    dims = ParallelDims.of(config.learner, place.world)
    train_apart(sequence=dims.sequence, tensor=dims.tensor)
    sizes = dims.mesh
    mesh = init_device_mesh(place.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return FSDP2(mesh, on_host=config.learner.offload == "all")


@contextmanager
def joined_ranks(config: Config, place: Place) -> Iterator[FSDP2]:
    """`join_ranks`, and leave together: rank 0 hosts the store of the others, so it must not go first. Who fails leaves
    at once."""
    try:
        yield join_ranks(config, place)
        barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
