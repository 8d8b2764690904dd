"""Identity of a learner rank, in a run or in a rerun of it, and its device."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers.utils import logging as transformers_logging

from asyncrl.checks.placement import PLACED, unplaced_gpus
from asyncrl.checks.rules.settings import one_device_for_all
from asyncrl.errors import ConfigError
from asyncrl.storage.log_stream import keep_logging

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables by which a user configures torch's allocator; then nothing is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank this is, and on which device it computes."""

    rank: int
    world: int
    device: torch.device
    restarted: bool
    """Whether the ranks were started again after one of them, or their torchrun, died. Not set after machines joined or
    left (`Checkpoints.begun`)."""
    run_id: str
    """The run that owns the folder; the same for all restarts."""

    @classmethod
    def of(cls, environment: Mapping[str, str], device: str) -> Place:
        """Read it from torchrun's variables. `device` is `learner.device`: `auto`, `cpu`, `cuda` or `cuda:N`.

        Raises:
            ConfigError: a GPU is requested but there is none, or one GPU for several ranks; or torch sees GPUs that
                were assigned to no process.
        """
        here = int(environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1")))
        if ":" in device and here > 1:
            raise ConfigError(one_device_for_all(device, here))
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"learner.device={device}, but torch sees no GPU here. Use learner.device=auto or cpu")
        if device in PLACED and (why := unplaced_gpus(torch.cuda.device_count())):
            raise ConfigError(why)
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        local = int(environment.get("LOCAL_RANK", "0"))
        # torchrun without --rdzv-id names every run "none"; then its own process is what stays the same over restarts.
        named = environment.get("TORCHELASTIC_RUN_ID", uuid.uuid4().hex[:12])
        return cls(
            rank=int(environment.get("RANK", "0")),
            world=int(environment.get("WORLD_SIZE", "1")),
            device=torch.device(kind, local) if kind == "cuda" else torch.device(kind),
            # Set by torchrun after the death of a rank, or by `asyncrl local` after the death of torchrun.
            restarted=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 or "ASYNCRL_RESTARTED" in environment,
            run_id=f"{socket.gethostname()}-{os.getppid()}" if named == "none" else named,
        )


def prepare_process(place: Place, level: int, share: float = 1.0, *, lends_memory: bool = False) -> None:
    """Set up logging, threads, device and precision of this rank.

    Args:
        level: log level.
        share: fraction of its GPU's memory that it may use; beyond it, torch raises an out-of-memory error.
        lends_memory: whether other processes open its GPU memory (`weights.backend=ipc`).
    """
    keep_logging()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    # Logged at every gather of a weight that tensor parallelism and FSDP2 both shard: rare, and outside the step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # at every checkpoint of one rank
    if place.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        # Packs differ in length from step to step. In segments of fixed sizes each leaves gaps that the next does not
        # fit, and memory runs out while a fifth of it is free. Another process cannot open segments that grow.
        if not lends_memory and not any(os.environ.get(name) for name in ALLOCATOR):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(place.device)
        torch.cuda.set_per_process_memory_fraction(share, place.device)
    # float32 must be exact, because log-ratios compare with an engine's: TF32 keeps 10 bits of a factor. By default
    # torch uses it for convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def memory_of(device: torch.device, ranks: int) -> int:
    """Bytes of GPU memory that this process may use; without a GPU an equal share of this machine's memory, as if all
    ranks ran on it."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return int(whole * torch.cuda.get_per_process_memory_fraction(device))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
