"""Train learner ranks in processes of their own, fed with a fixed sequence of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from asyncrl.learner import roles
from asyncrl.learner.assembly import assemble
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.backends.factory import backend_of
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.train import train
from asyncrl.schema import Config
from tests.forked import forked_from
from tests.learner.fed_replay import FedReplay, KeptRows, KeptWeights
from tests.learner.smooth_steps import make_smooth_optimizer


def on_ranks(work: Callable[..., None], world: int, folder: Path, *given: Any) -> None:
    """Run `work(rank, *given)` in `world` processes joined by gloo, by a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    forked_from(work.__module__)
    start_processes(_joined, args=(world, folder, work, given), nprocs=world, start_method="forkserver")


def _joined(rank: int, world: int, folder: Path, work: Callable[..., None], given: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    work(rank, *given)
    dist.barrier()  # who leaves while another is in its last collective may be ended by gloo
    dist.destroy_process_group()


def train_on_ranks(
    config: Config,
    world: int,
    *,
    groups: int = 4,
    size: int = 4,
    resume: bool = False,
    replay: Callable[[], FedReplay] | None = None,
    backend: Callable[[Config, Place], Backend] = backend_of,
) -> dict[str, torch.Tensor]:
    """Train in `world` processes joined by gloo, each with a `replay` of its own. Return the weights published last.

    It writes to the run's folder: `first.safetensors` and `published.safetensors`, the weights published first and
    last; `begun.safetensors` and `learned.safetensors`, the trained weights before and after;
    `begun_moments.safetensors` and `moments.safetensors`, the optimizer's moments before and after; `row.safetensors`,
    the last row.
    """
    folder = Path(config.run.dir)
    make = replay or partial(FedReplay, groups=groups, size=size)
    on_ranks(_rank, world, folder, world, config, make, resume, backend)
    return load_file(folder / "published.safetensors")


def _rank(
    rank: int,
    world: int,
    config: Config,
    replay: Callable[[], FedReplay],
    resume: bool,
    backend: Callable[[Config, Place], Backend],
) -> None:
    roles.make_optimizer = make_smooth_optimizer
    folder, device = Path(config.run.dir), torch.device("cpu")
    publisher, rows = KeptWeights(), KeptRows()
    place = Place(rank=rank, world=world, device=device, restarted=False, run_id="ranks")
    with ExitStack() as opened:
        parts = assemble(
            config,
            place,
            opened,
            backend=backend(config, place),
            replay=replay(),
            run_dir=folder,
            resume="auto" if resume else "never",
            publisher=lambda _: publisher,
            log=lambda _: rows,
        )
        begun, begun_moments = trained_weights(parts.roles), trained_moments(parts.roles)
        train(config, parts)
        moments = trained_moments(parts.roles)
    learned = trained_weights(parts.roles)
    if rank == 0:
        save_file(begun_moments, folder / "begun_moments.safetensors")
        save_file(moments, folder / "moments.safetensors")
        save_file(begun, folder / "begun.safetensors")
        save_file(learned, folder / "learned.safetensors")
        save_file(publisher.first, folder / "first.safetensors")
        save_file(publisher.newest, folder / "published.safetensors")
        row = {name: torch.tensor(value) for name, value in rows.rows[-1].items()}
        save_file(row, folder / "row.safetensors")


def trained_weights(trained: roles.Roles) -> dict[str, torch.Tensor]:
    """Return `{"policy.NAME": tensor, "critic.NAME": tensor}`, gathered from all ranks."""
    return {
        f"{name}.{key}": whole(tensor)
        for name, model, _ in trained.trained()
        for key, tensor in model.named_parameters()
    }


def trained_moments(trained: roles.Roles) -> dict[str, torch.Tensor]:
    """Return `{"policy.NAME.exp_avg": tensor, ...}`, gathered from all ranks."""
    return {
        f"{name}.{key}.{moment}": whole(value)
        for name, model, optimizer in trained.trained()
        for key, parameter in model.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()  # `state[parameter]` would add frozen ones
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor, gathered from all ranks."""
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.detach().clone()
