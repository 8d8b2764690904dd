"""Handles a step that does not fit the device: once, all ranks restart from the checkpoint with half the micro-batch.

A rank that runs out of memory in the middle of a step has left the others in collectives of that step, so the ranks
cannot repeat the step together. Instead the rank notes the budget and ends, torchrun restarts all ranks, rank 0 reads
the note for all, and the same batches are trained in smaller pieces. If half is too much as well, the run ends and
names the setting that helps most.

logs/out_of_memory.json   the budget that was too large, and the settings it applied to
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from asyncrl.checks.parallel import LAID_OUT_BY
from asyncrl.config import LOG_DIR
from asyncrl.errors import AsyncRLError, ConfigError, StepMemoryError
from asyncrl.learner.parallel.collectives import text_of_rank_zero
from asyncrl.schema import Config
from asyncrl.storage import sealed
from asyncrl.storage.objects import read_object

log = logging.getLogger(__name__)

NOTE_FILE = "out_of_memory.json"
TOLD = ("out of memory", "ALLOC_FAILED", "DEVICE_ALLOCATION_FAILED")
"""In the messages of the driver, cuBLAS, cuDNN, nccl and Triton, which take GPU memory beside torch's allocator: their
errors are no `torch.OutOfMemoryError`."""


def _note(run_dir: Path) -> Path:
    return run_dir / LOG_DIR / NOTE_FILE


def _of(config: Config) -> list[object]:
    """The settings that the memory of a step depends on: the note does not apply with others."""
    model, learner = config.model, config.learner
    kept = model.activation_checkpointing, model.checkpoint_every, model.checkpoint_keep, model.lora_rank
    dims = (getattr(learner, name) for name in LAID_OUT_BY)
    return [*kept, learner.offload, learner.optimizer, learner.ranks, *dims]


def _noted(note: Path, config: Config) -> int:
    """The budget that was too large with these settings; 0 if there is none."""
    try:
        said = read_object(note)
        return int(said["budget"]) if said["of"] == _of(config) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def heed_note(config: Config, run_dir: Path, rank: int, device: torch.device) -> None:
    """Halve the budget of a micro-batch in `config` if a step with it did not fit. Collective."""
    mine = _noted(_note(run_dir), config) if rank == 0 else 0
    noted = int(text_of_rank_zero(str(mine), device))
    if not noted or config.learner.max_tokens_per_microbatch < noted:
        return
    halved = max(1, noted // 2)
    log.warning(
        "a step with learner.max_tokens_per_microbatch=%d did not fit the memory of a rank: continuing with %d. "
        "Delete %s to try the full size again",
        *(noted, halved, _note(run_dir)),
    )
    config.learner.max_tokens_per_microbatch = halved
    config.learner.max_attention_per_microbatch //= 2


@contextmanager
def one_more_try(config: Config, run_dir: Path, rank: int) -> Iterator[None]:
    """Context of a step.

    Raises:
        StepMemoryError: the step did not fit; it is repeated with half the micro-batch after a restart.
        ConfigError: it did not fit with half the micro-batch either.
    """
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        budget, note = config.learner.max_tokens_per_microbatch, _note(run_dir)
        why = str(error).partition("\n")[0].split(". ")[0]
        # Other ranks may have run out of memory in the same step: their note has the same budget.
        if _noted(note, config) > budget:
            raise ConfigError(
                f"rank {rank} ran out of memory in a step with half the micro-batch too ({budget} tokens): {why}. What "
                f"lowers it most: {lowers_most(config)}. Then resume=auto"
            ) from error
        note.parent.mkdir(parents=True, exist_ok=True)
        sealed.replace_text(
            note, json.dumps({"budget": budget, "of": _of(config)}) + "\n", note.with_suffix(f".{rank}")
        )
        raise StepMemoryError(
            f"rank {rank} ran out of memory in a step with learner.max_tokens_per_microbatch={budget}: {why}. All "
            "ranks start again from the newest checkpoint with half of it"
        ) from error


@contextmanager
def memory_named(config: Config, rank: int) -> Iterator[None]:
    """Context of everything beside the steps: models are made, weights sent, checkpoints loaded and saved. A smaller
    micro-batch would not help there, and a restart would fail in the same place.

    Raises:
        ConfigError: the GPU's memory is full; the message names the setting that lowers it most.
    """
    try:
        yield
    except RuntimeError as error:
        if not ran_out(error):
            raise
        why = str(error).partition("\n")[0].split(". ")[0]
        raise ConfigError(
            f"rank {rank} ran out of memory outside of a step, where models are made, sent, loaded or saved: {why}. "
            f"What lowers it most: {holds_less(config)}. Then resume=auto"
        ) from error


def ran_out(error: RuntimeError) -> bool:
    """Whether the error says that a GPU's memory is full."""
    told = not isinstance(error, AsyncRLError) and any(form in str(error) for form in TOLD)
    return told or isinstance(error, torch.OutOfMemoryError)


def holds_less(config: Config) -> str:
    """The setting that lowers most what the models hold between steps, in words."""
    learner = config.learner
    if learner.offload == "none":
        return "learner.offload=optimizer keeps Adam's moments in host memory, half of what a rank holds"
    if learner.offload == "optimizer":
        return "learner.offload=all keeps weights and gradients in host memory too"
    if learner.optimizer == "adamw":
        return "learner.optimizer=adamw_8bit keeps the moments in a quarter of the memory"
    return "more learner.ranks share weights, gradients and moments"


def lowers_most(config: Config) -> str:
    """The setting that lowers memory most, in words."""
    budget = config.learner.max_tokens_per_microbatch
    if not config.model.activation_checkpointing:
        return "model.activation_checkpointing=true keeps the activations of one layer instead of all"
    if config.model.checkpoint_every > 1:
        return "model.checkpoint_every=1 recomputes every layer and keeps the activations of only one"
    if config.model.checkpoint_keep != "nothing":
        return "model.checkpoint_keep=nothing keeps only the input of a layer"
    if budget > config.data.max_prompt_tokens + config.rollout.max_new_tokens:
        return f"learner.max_tokens_per_microbatch={budget // 2}"
    if config.learner.offload != "all":
        return "learner.offload=all keeps weights, gradients and moments in host memory"
    return "more learner.ranks share weights, gradients and moments (a micro-batch is a single sequence already)"
