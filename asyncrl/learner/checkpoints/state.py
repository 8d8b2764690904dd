"""`state.json`: the learner's state in a checkpoint, except its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.errors import CheckpointDamagedError, CheckpointMismatchError
from asyncrl.storage.checkpoints import STATE_FILE
from asyncrl.storage.objects import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    step: int
    """Last trained step (from 0)."""
    policy_version: int
    """Version of the saved weights."""
    skipped_steps: int
    """Optimizer steps skipped for non-finite numbers so far."""
    kl_coef: float = 0.0
    """KL coefficient of the reward for the next step."""
    norms: dict[str, list[float]] = field(default_factory=dict)
    """By model: the gradient norms that the next one is compared with (`optimizer.spikes`)."""
    spikes: dict[str, int] = field(default_factory=dict)
    """By model: the number of updates skipped as spikes so far."""
    run: str = ""
    """The run that saved it, the same through all its resumes (`origin_of`)."""


def read_state(file: Path) -> LearnerState:
    """Read `state.json`. Raises CheckpointDamagedError, CheckpointMismatchError."""
    try:
        values = read_object(file)
    except (OSError, ValueError) as error:
        raise CheckpointDamagedError(
            f"{file} cannot be read: {error}; resume from another checkpoint: resume=PATH"
        ) from error
    try:
        return LearnerState(**values)
    except TypeError as error:
        raise CheckpointMismatchError(
            f"{file} was written by another version of asyncrl: it has {', '.join(values)}. Resume with that version, "
            "or start a new run with the model that it exported"
        ) from error


def refuse_stranger(checkpoint: Path, run: str, way_out: str) -> None:
    """Raises CheckpointMismatchError if `checkpoint`, in the folder of `run`, was saved by another run."""
    saved_by = read_state(checkpoint / STATE_FILE).run
    if saved_by and run and saved_by != run:
        raise CheckpointMismatchError(
            f"{checkpoint} was saved by run {saved_by}, but this folder belongs to run {run}: {way_out}"
        )
