"""`asyncrl export RUN --step 50`: a checkpoint of a run as a Hugging Face model, without its other ranks or a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.utils import logging as transformers_logging

from asyncrl.cli.settings_file import with_files
from asyncrl.config import disk_patience, read_config
from asyncrl.errors import AsyncRLError, CheckpointError, CheckpointMismatchError, RunFolderError
from asyncrl.learner.checkpoint import PARTS
from asyncrl.learner.export import export_hf
from asyncrl.learner.fitting import check_fits, shapes_in
from asyncrl.learner.lora import check_base, without_frozen
from asyncrl.learner.model import PolicyModel, build_model
from asyncrl.learner.state import refuse_stranger
from asyncrl.plain_text import make_streams_plain
from asyncrl.schema import Config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig, learner_config
from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, finished, proven, trained_steps
from asyncrl.telemetry.resumed import CONFIG_FILE, is_supervised
from asyncrl.telemetry.run_folder import config_note, origin_of

CPU = torch.device("cpu")
EXPORTS = "exports"
"""In the folder of the run: exports/step_50/hf."""


def main(run: Path, step: int | None, target: Path | None, *, average: bool) -> int:
    """Write the model of the checkpoint after `step` (None: the newest whole one) to `target`.

    Args:
        average: the moving average of the policy (`learner.proximal_ema`) instead of the policy.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged. RunFolderError, ConfigError: `run` is no run.
    """
    transformers_logging.disable_progress_bar()
    config = settings_of(run)
    path = chosen_checkpoint(run, step)
    steps = trained_steps(path)
    target = target or run / EXPORTS / path.name / ("average" if average else "hf")
    # On one rank that computes in half precision a model is sharded, which takes ranks: nothing is computed here.
    whole = replace(config, model=replace(config.model, dtype="float32"))
    model = build_model(whole, CPU, None)
    fill(model, path, "average" if average else "model")
    target.parent.mkdir(parents=True, exist_ok=True)
    export_hf(model, config.model, target, 0, disk_patience(config), trained=steps)
    print(f"{path} is in {target}: the {'averaged ' if average else ''}policy after {steps} steps")
    return 0


def settings_of(run: Path) -> Config:
    file = run / CONFIG_FILE
    if not file.is_file():
        raise RunFolderError(f"{run} is no run folder: it has no {CONFIG_FILE}")
    if said := config_note(run):
        print(f"note: {said}", file=sys.stderr)
    if not is_supervised(run):
        return read_config(file)
    # Without the second it would be said in which folder the run is repeated, and none is.
    return learner_config(load_sft(with_files([str(file), "overwrite=true"], SftConfig)))


def chosen_checkpoint(run: Path, step: int | None) -> Path:
    """Proven, and of this run. Raises CheckpointError."""
    folder = run / CHECKPOINT_DIR
    if step is None:
        path = proven(run, "auto", lambda line: print(f"note: {line}", file=sys.stderr))
        if path is None:
            raise CheckpointError(f"{run} has no checkpoint yet (in {folder})")
    else:
        path = folder / f"step_{step}"
        if not path.is_dir():
            there = ", ".join(each.name for each in finished(folder)) or "none"
            raise CheckpointError(f"{path} is not there. There are {there} (learner.keep_every keeps some for good)")
        sealed.verify(path)
    refuse_stranger(path, origin_of(run), "export it from the folder of that run, or delete it")
    return path


def fill(model: PolicyModel, path: Path, part: str) -> None:
    """Weights alone, of the optimizer nothing is read. Raises CheckpointMismatchError."""
    saved = {name: shape for name, shape in shapes_in(path).items() if name.startswith(f"{part}.")}
    if not saved:
        raise CheckpointMismatchError(f"{path} has no {part}: it was trained without learner.proximal_ema")
    weights: dict[str, Any] = get_model_state_dict(model)
    if part == "model":
        check_base(path, model.adapters)
        weights = without_frozen(model, weights)
    loaded = {part: weights}
    check_fits(path, saved, loaded)
    state_dict_loader.load(loaded, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, weights, options=PARTS)


if __name__ == "__main__":  # of a learner, for `learner.export_every`
    make_streams_plain()
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), None, average=False))
    except AsyncRLError as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        sys.exit(1)
