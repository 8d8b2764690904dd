"""`asyncrl export RUN --step 50`: write a checkpoint as a Hugging Face model, without other ranks or a GPU."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.utils import logging as transformers_logging

from asyncrl.cli.arguments.settings_file import with_files
from asyncrl.config import read_config
from asyncrl.errors import AsyncRLError, CheckpointError, CheckpointMismatchError, RunFolderError
from asyncrl.learner.checkpoints.export import adapter_of, export_hf
from asyncrl.learner.checkpoints.fitting import check_fits, shapes_in
from asyncrl.learner.checkpoints.state import refuse_stranger
from asyncrl.learner.checkpoints.tensors import PARTS
from asyncrl.learner.checkpoints.writing import said_of
from asyncrl.learner.model.lora import ADAPTER_FILE, check_base, without_frozen
from asyncrl.learner.model.policy import PolicyModel, build_model
from asyncrl.plain_text import make_streams_plain
from asyncrl.schema import Config, ModelConfig
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import (
    CHECKPOINT_DIR,
    EXPORT_DIR,
    EXPORTED_FILE,
    exported,
    finished,
    newest_proven,
    trained_steps,
)
from asyncrl.storage.occupancy import in_turn
from asyncrl.telemetry.folder.resumed import is_supervised, settings_file
from asyncrl.telemetry.folder.run_folder import config_note, origin_of

CPU = torch.device("cpu")
TRIES = 10
"""Limit on attempts to read a checkpoint: an active run may delete the one being read, each time for a newer one."""


def main(run: Path, step: int | None, target: Path | None, *, average: bool) -> int:
    """Write the model of the checkpoint after `step` (None: the newest whole one) to `target`.

    Args:
        average: export the moving average of the policy (`learner.proximal_ema`) instead of the policy.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged. RunFolderError, ConfigError: `run` is not a run
            folder, or `target` contains files that would be lost.
    """
    transformers_logging.disable_progress_bar()
    config = settings_of(run)
    if target is not None:
        target = target.resolve()
        refuse_lossy(target, config.model)
    model, path, steps = read(config, run, step, "average" if average else "model")
    target = target or exported(path, "average" if average else EXPORT_DIR)
    target.parent.mkdir(parents=True, exist_ok=True)
    said = f"note: another export is writing into {target.parent}; waiting until it ends"
    with in_turn(target.parent, lambda: print(said, file=sys.stderr)):  # exports write aside first, under the same name
        refuse_lossy(target, config.model)
        export_hf(model, config.model, target, 0, trained=steps)
    print(f"{path} is in {target}: the {'averaged ' if average else ''}policy after {steps} steps")
    return 0


def settings_of(run: Path) -> Config:
    file = settings_file(run)
    if said := config_note(run):
        print(f"note: {said}", file=sys.stderr)
    if not is_supervised(run):
        return read_config(file)
    # Without these overrides a note would say in which folder the run is repeated, but it is not repeated.
    return learner_config(load_sft(with_files([str(file), "overwrite=true", "resume=never"], SftConfig)))


def refuse_lossy(target: Path, model: ModelConfig) -> None:
    """Refuse a target whose files the export would delete: it replaces the folder that it is written to.

    Raises:
        RunFolderError: the folder contains files that no export wrote.
    """
    for folder in [target, *([adapter_of(target)] if model.lora_rank else [])]:
        if not folder.exists():
            continue
        if not folder.is_dir():
            raise RunFolderError(
                f"{folder} is a file. Give --to a folder that is new or empty, or that an export wrote"
            )
        ours = any((folder / name).is_file() for name in (EXPORTED_FILE, ADAPTER_FILE))
        if others := sealed.strangers(folder) if ours else sorted(path.name for path in folder.iterdir()):
            raise RunFolderError(
                f"{folder} contains {', '.join(others[:3])}, which no export wrote and this one would delete. Give "
                "--to a folder that is new or empty, or that an export wrote"
            )


def chosen_checkpoint(run: Path, step: int | None) -> Path:
    """Return the checkpoint to export, after checking that it is intact and of this run. Raises CheckpointError."""
    folder = run / CHECKPOINT_DIR
    if step is None:
        path = newest_proven(run, lambda line: print(f"note: {line}", file=sys.stderr))
        if path is None:
            raise CheckpointError(f"{run} has no checkpoint yet (in {folder})")
    else:
        path = folder / f"step_{step}"
        if not path.is_dir():
            raise CheckpointError(not_there(path))
        sealed.verify(path)
    refuse_stranger(path, origin_of(run), "export it from the folder of that run, or delete it")
    return path


def read(config: Config, run: Path, step: int | None, part: str) -> tuple[PolicyModel, Path, int]:
    """Read a part of a checkpoint.

    Args:
        part: `model`, or `average` for the moving average.

    Returns:
        The model, the checkpoint that it was read from, and the number of steps trained before that was saved.

    Raises:
        CheckpointError: there is none, it is damaged, or its run deleted it meanwhile.
    """
    # A model that computes in half precision is sharded even on one rank, which needs a group of ranks. Use float32, as
    # nothing is computed here.
    whole = replace(config, model=replace(config.model, dtype="float32"))
    model: PolicyModel | None = None
    for _ in range(TRIES):
        path = run if step is None else run / CHECKPOINT_DIR / f"step_{step}"
        try:
            path = chosen_checkpoint(run, step)
            model = model or build_model(whole, CPU, None)
            fill(model, path, part)
            return model, path, trained_steps(path)
        except (OSError, CheckpointError, CheckpointException) as error:
            if path.is_dir():
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path} cannot be read: {said_of(error)}") from error
            if step is not None:
                raise CheckpointError(not_there(path)) from error
    raise CheckpointError(
        f"{run} saved newer checkpoints and deleted the one that was being read, {TRIES} times. Keep more of them "
        "with learner.keep_checkpoints or learner.keep_every, or export after the run has ended"
    )


def not_there(path: Path) -> str:
    there = ", ".join(each.name for each in finished(path.parent)) or "none"
    return f"{path} does not exist. There are {there} (learner.keep_every keeps some permanently)"


def fill(model: PolicyModel, path: Path, part: str) -> None:
    """Fill `model` with the weights of a checkpoint, without reading the optimizer. Raises CheckpointMismatchError."""
    saved = {name: shape for name, shape in shapes_in(path).items() if name.startswith(f"{part}.")}
    if not saved:
        raise CheckpointMismatchError(f"{path} has no {part}: it was trained without learner.proximal_ema")
    weights: dict[str, Any] = get_model_state_dict(model)
    if part == "model":
        check_base(path, model.adapters)
        weights = without_frozen(model, weights)
    loaded = {part: weights}
    check_fits(path, saved, loaded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a warning that there is only one process
        state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, weights, options=PARTS)


if __name__ == "__main__":  # started by a learner, for `learner.export_every`
    make_streams_plain()
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), None, average=False))
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        sys.exit(1)
