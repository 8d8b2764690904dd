"""A rank of the learner, in a run or in a rerun of it: which it is, and where it computes."""

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

from asyncrl.checks.rules.settings import one_device_for_all
from asyncrl.errors import ConfigError
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
