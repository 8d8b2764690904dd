"""A rank of the learner, in a run or in a rerun of it: where it computes, whom it meets, what it trains with."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.ranks import choice_of_rank_zero
from asyncrl.learner.resume import Start, begin
from asyncrl.learner.roles import Roles, build_roles
from asyncrl.learner.train import StepLog, Training
from asyncrl.replay.base import LearnerReplay
from asyncrl.schema import Config
from asyncrl.weights.base import Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank this is, and on what it computes."""

    rank: int
    world: int
    device: torch.device
    restarted: bool
    """torchrun has restarted the ranks after one of them died."""
    run_id: str
    """The run whose folder this is; the same for all restarts."""

    @classmethod
    def of(cls, environment: Mapping[str, str], device: str) -> Place:
        """From what torchrun sets. `device` is `learner.device`: `auto`, `cpu` or `cuda`.

        Raises:
            ConfigError: a GPU is asked for where there is none.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("learner.device=cuda, but torch sees no GPU here. Use learner.device=auto or cpu")
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        local = int(environment.get("LOCAL_RANK", "0"))
        # torchrun without --rdzv-id names every run "none"; its own process is what lasts over restarts then.
        named = environment.get("TORCHELASTIC_RUN_ID", uuid.uuid4().hex[:12])
        return cls(
            rank=int(environment.get("RANK", "0")),
            world=int(environment.get("WORLD_SIZE", "1")),
            device=torch.device(kind, local) if kind == "cuda" else torch.device(kind),
            restarted=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0,
            run_id=f"{socket.gethostname()}-{os.getppid()}" if named == "none" else named,
        )


def prepare_process(place: Place, level: int) -> None:
    """Logging, threads and device of this rank.

    Args:
        level: of the log.
    """
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said at every checkpoint of one rank
    if place.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(place.device)


def join_ranks(config: Config, place: Place) -> DeviceMesh:
    """The process group of the ranks, of one rank too: the same FSDP2 path then runs everywhere.

    Its deadline covers what rank 0 may do alone while the others wait in a collective: wait for a batch, for the
    engines to acknowledge weights, write a checkpoint.
    """
    patience = timedelta(seconds=config.replay.wait_timeout_s + 10 * config.weights.timeout_s + 60)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    if place.world == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
    else:
        dist.init_process_group(backend, timeout=patience)
    return init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",))


class ClosableLog(StepLog, Protocol):
    def close(self) -> None: ...


class NoLog:
    """What the ranks other than 0 write to."""

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        return

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        return

    def close(self) -> None:
        return


def assemble(
    config: Config,
    place: Place,
    opened: ExitStack,
    *,
    mesh: DeviceMesh,
    replay: LearnerReplay,
    run_dir: Path,
    resume: str,
    publisher: Callable[[Roles], Publisher],
    log: Callable[[Start], ClosableLog],
) -> Training:
    """Build the models, go to where training begins, then open publisher and log. Collective.

    Args:
        opened: closes publisher and log.
        resume: as the setting.
        publisher: of the weights that training begins with.
        log: called on rank 0 alone.

    Raises:
        CheckpointError, ConfigError: see `Checkpoints` and `build_roles`.
    """
    checkpoints = Checkpoints(run_dir / "ckpt", rank=place.rank, keep=config.learner.keep_checkpoints)
    found = checkpoints.choose(resume, place.restarted) if place.rank == 0 else None
    resume_from = choice_of_rank_zero(found, place.device)
    roles = build_roles(config, place.device, mesh)
    start = begin(replay, checkpoints, roles, resume_from, rank=place.rank, device=place.device)
    sender = publisher(roles)
    opened.callback(sender.close)
    rows = log(start) if place.rank == 0 else NoLog()
    opened.callback(rows.close)
    return Training(
        replay=replay,
        publisher=sender,
        roles=roles,
        checkpoints=checkpoints,
        start=start,
        log=rows,
        run_dir=run_dir,
        rank=place.rank,
        world=place.world,
        device=place.device,
    )
