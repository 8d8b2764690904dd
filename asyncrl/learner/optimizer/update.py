"""The optimizer step: AdamW, learning-rate schedule, global gradient norm, and the guard against non-finite numbers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from asyncrl.errors import NonFiniteError
from asyncrl.learner.batch.micro_batch import MicroBatch
from asyncrl.learner.optimizer.eight_bits import EightBits, check_blocks
from asyncrl.learner.optimizer.one_by_one import HostMoments
from asyncrl.learner.parallel.collectives import data_ranks
from asyncrl.learner.parallel.sharding import shards_of
from asyncrl.schema import LearnerConfig
from asyncrl.weights.publishing.sharding import local

log = logging.getLogger(__name__)


def make_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW, fused; weight decay on matrices only, not on norms and biases.

    Raises:
        ConfigError: `learner.optimizer` does not support this layout.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        if parameter.requires_grad:
            groups[parameter.ndim >= 2].append(parameter)
    decayed: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "weight_decay": 0.0}]
    made = HostMoments if config.offload == "optimizer" else torch.optim.AdamW
    if config.optimizer == "adamw_8bit":
        check_blocks(groups[True])
        made = EightBits
    optimizer = made(
        [group for group in decayed if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    _start_moments(optimizer)
    return optimizer


def _start_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer state before the first step, with moments of 0 and a step count of 0.

    Otherwise, on loading a checkpoint from before the first step (critic warm-up, skipped steps), torch would allocate
    it with a step of size 0, which the bias correction counts: saving would change the result of a run.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def learning_rate(step: int, config: LearnerConfig, peak: float | None = None, *, first: int = 0) -> float:
    """Learning rate of train step `step` (from 0): linear warm-up to `peak` (default `lr`), then `schedule`, which
    reaches `min_lr_ratio` of it at `steps`.

    Args:
        first: the step at which the warm-up starts.
    """
    peak = config.lr if peak is None else peak
    if step - first < config.warmup_steps:
        return peak * (step - first + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    left = (config.steps - step) / max(1, config.steps - first - config.warmup_steps)
    share = left if config.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Result of one optimizer step; equal on all ranks."""

    loss: float
    """Sum over ranks and micro-batches: the loss of the whole minibatch."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    applied: bool
    """False if loss or gradient was not finite, or a spike; weights and optimizer state are then unchanged."""
    lr: float
    spike: bool = False
    """Skipped although finite, because the norm was above the limit (`spikes`)."""


def apply_update(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    loss: Tensor,
    lr: float,
    clip_norm: float,
    limit: float = math.inf,
) -> UpdateReport:
    """Clip the accumulated gradients to `clip_norm`, step and clear them; skip if anything is not finite on any rank.

    Args:
        loss: scalar, this rank's share of the minibatch's loss.
        limit: a gradient with a larger norm is skipped, too.

    One all-reduce of two numbers makes all ranks decide alike.
    """
    whole = [p.grad for p in parameters if p.grad is not None]
    gradients = [local(gradient) for gradient in whole]
    world = dist.get_world_size() if dist.is_initialized() else 1
    squares = torch.zeros((), dtype=torch.float64, device=loss.device)
    alike: dict[int, list[Tensor]] = {}
    for gradient, part in zip(whole, gradients, strict=True):
        alike.setdefault(_copies(gradient, world), []).append(part)
    for copies, parts in sorted(alike.items()):
        squares = squares + get_total_norm(parts).double().square() / copies
    # Ranks that share sequences have the same loss of them.
    totals = torch.stack([squares, loss.detach().double() * data_ranks() / world])
    if world > 1:
        dist.all_reduce(totals)
    square_sum, total_loss = totals.tolist()
    finite = math.isfinite(square_sum) and math.isfinite(total_loss)
    norm = math.sqrt(square_sum) if math.isfinite(square_sum) else square_sum
    spike = finite and norm > limit
    applied = finite and not spike
    if applied:
        if norm > clip_norm:
            for gradient in gradients:
                gradient.mul_(clip_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return UpdateReport(loss=total_loss, grad_norm=norm, applied=applied, lr=lr, spike=spike)


def _copies(gradient: Tensor, world: int) -> int:
    """Number of ranks that hold the same shard of it, each of which adds it to the sum over all ranks."""
    return world // shards_of(gradient)


class NonFiniteGuard:
    """Counts skipped steps, saves their batches, and ends a run that does not recover."""

    def __init__(self, folder: Path, rank: int, limit: int) -> None:
        self._folder, self._rank, self._limit = folder, rank, limit
        self.skipped = 0
        self.consecutive = 0

    def observe(self, step: int, report: UpdateReport, batches: Sequence[MicroBatch]) -> None:
        """Call after every optimizer step.

        Args:
            step: counted from 1, as in metrics.

        Raises:
            NonFiniteError: more than `max_nonfinite_steps` in a row were skipped.
        """
        if report.applied or report.spike:
            self.consecutive = 0
            return
        self.skipped += 1
        self.consecutive += 1
        try:
            dump = f"The batches are in {self._dump(step, batches).parent}"
        except OSError as error:  # not a reason to end the run: it may recover at the next step
            dump = f"The batches could not be kept: {error}"
        log.warning("step %d: loss %s, gradient norm %s, no update. %s", step, report.loss, report.grad_norm, dump)
        if self.consecutive > self._limit:
            raise NonFiniteError(
                f"loss or gradient was not finite {self.consecutive} optimizer steps in a row (loss {report.loss}, "
                f"gradient norm {report.grad_norm}); learner.max_nonfinite_steps={self._limit} allows {self._limit}. "
                f"{dump}; lower learner.lr or inspect the model"
            )

    def _dump(self, step: int, batches: Sequence[MicroBatch]) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"step_{step}" if self._rank == 0 else f"step_{step}_rank_{self._rank}"
        # Several updates of a step may fail, and the same step again after a resume.
        names = (f"{stem}{again}.npz" for again in itertools.chain([""], (f".{n}" for n in itertools.count(2))))
        path = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        arrays: dict[str, np.ndarray] = {}
        for i, batch in enumerate(batches):
            for name, tensor in batch.tensors().items():
                arrays[f"{i}_{name}"] = tensor.cpu().numpy()
        with path.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        return path
