"""One learner rank: `torchrun ... -m asyncrl.learner key=value ...`; plain `python -m` is a world of one."""

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
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging as transformers_logging

from asyncrl.config import JOURNAL_DIR, config_to_dict, load_config, run_digest
from asyncrl.errors import (
    AsyncRLError,
    CheckpointMismatchError,
    ConfigError,
    DataError,
    RewardError,
    RunFolderError,
)
from asyncrl.learner.canary import ProvingPublisher
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.launcher import Launcher
from asyncrl.learner.ranks import barrier, choice_of_rank_zero
from asyncrl.learner.resume import Start, begin
from asyncrl.learner.roles import build_roles
from asyncrl.learner.train import Training, train
from asyncrl.machine import check_machine
from asyncrl.replay.client import LearnerClient
from asyncrl.schema import Config
from asyncrl.telemetry.metrics import MetricsLog
from asyncrl.telemetry.progress import format_line
from asyncrl.telemetry.run_folder import prepare_run_folder
from asyncrl.weights.factory import make_publisher

log = logging.getLogger("asyncrl.learner")


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


def main(overrides: Sequence[str], failed: Callable[[AsyncRLError], None] | None = None) -> int:
    """Run one rank to the end of training.

    Args:
        failed: called with the error that ended training, before anything is closed.

    Raises:
        AsyncRLError: a refused setting, or what ended training.
    """
    try:
        with ExitStack() as opened:
            try:
                work(overrides, opened)
            except AsyncRLError as error:
                if failed is not None:
                    failed(error)
                raise
        barrier()  # rank 0 hosts the store of the others: it must not leave first
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def work(overrides: Sequence[str], opened: ExitStack) -> None:
    """Join the other ranks and train; what has to be closed goes into `opened`."""
    config = load_config(overrides)
    place = Place.of(os.environ, config.learner.device)
    check_machine(config, "learner")
    level = logging.INFO if place.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # said at every checkpoint of one rank
    if place.device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        torch.cuda.set_device(place.device)
    run(config, place, join_ranks(config, place), opened)


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


def run(config: Config, place: Place, mesh: DeviceMesh, opened: ExitStack) -> None:
    """Connect the parts and train."""
    replay = LearnerClient(config.replay.address, rank=place.rank, run_digest=run_digest(config), config=config.replay)
    opened.callback(replay.close)
    run_dir = Path(config.run.dir).resolve()
    if place.rank == 0:
        run_dir = prepare_run_folder(config, place.run_id, keep=(JOURNAL_DIR,))
    checkpoints = Checkpoints(run_dir / "ckpt", rank=place.rank, keep=config.learner.keep_checkpoints)
    found = checkpoints.choose(config.resume, place.restarted) if place.rank == 0 else None
    resume_from = choice_of_rank_zero(found, place.device)
    roles = build_roles(config, place.device, mesh)
    start = begin(replay, checkpoints, roles, resume_from, rank=place.rank, device=place.device)
    log.info("%d ranks on %s, from step %d (%s)", place.world, place.device, start.step, resume_from or "new")
    sender = make_publisher(config, replay, run_dir, place.rank, place.device)
    publisher = ProvingPublisher(sender, config, roles.policy, place.device)
    opened.callback(publisher.close)
    rows = open_log(config, run_dir, start) if place.rank == 0 else NoLog()
    opened.callback(rows.close)
    train(
        config,
        Training(
            replay=replay,
            publisher=publisher,
            roles=roles,
            checkpoints=checkpoints,
            start=start,
            log=rows,
            run_dir=run_dir,
            rank=place.rank,
            world=place.world,
            device=place.device,
        ),
    )


class NoLog:
    """What the ranks other than 0 write to."""

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        return

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        return

    def close(self) -> None:
        return


class PrintingLog(MetricsLog):
    """Also one line per step on stdout."""

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        super().write(step, policy_version, row)
        print(format_line({"step": step, "policy_version": policy_version, **row}), flush=True)


def open_log(config: Config, run_dir: Path, start: Start) -> PrintingLog:
    """The metrics files of the run, cut back to the checkpoint that training resumes from."""
    return PrintingLog(
        run_dir,
        config.run.name,
        config_to_dict(config),
        wandb=config.telemetry.wandb,
        tensorboard=config.telemetry.tensorboard,
        resume_step=start.step or None,
    )


HOPELESS = (CheckpointMismatchError, ConfigError, DataError, RewardError, RunFolderError)
"""What would end the ranks in the same way after every restart."""


def rank_main(overrides: Sequence[str]) -> int:
    """`main` as a process of its own: an error is said, and exit code 1."""
    launcher = Launcher.of(os.environ)

    def failed(error: AsyncRLError) -> None:
        print(f"asyncrl.learner: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, HOPELESS):  # told later, another rank could end of it first, and all be started again
            launcher.stop()

    try:
        return main(overrides, failed)
    except AsyncRLError:
        return 1


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1:]))
