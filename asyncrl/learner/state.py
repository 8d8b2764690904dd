"""What a checkpoint says of the learner beside its tensors: `state.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.errors import CheckpointMismatchError


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """Where the learner stood."""

    step: int
    """Last step that was trained (from 0)."""
    policy_version: int
    """Version of the saved weights."""
    skipped_steps: int
    """Optimizer steps skipped for non-finite numbers so far."""
    kl_coef: float = 0.0
    """Price of the KL in the reward, for the next step."""
    norms: dict[str, list[float]] = field(default_factory=dict)
    """By model, of the gradients that the next one is compared with (`spikes`)."""
    spikes: dict[str, int] = field(default_factory=dict)
    """By model, the updates skipped for them so far."""
    run: str = ""
    """Whose it is: the run of the folder it was saved in, the same through all resumes (`origin_of`)."""


def read_state(file: Path) -> LearnerState:
    """Raises CheckpointMismatchError."""
    values = json.loads(file.read_text())
    try:
        return LearnerState(**values)
    except TypeError as error:
        raise CheckpointMismatchError(
            f"{file} was written by another version of asyncrl: it has {', '.join(values)}. Resume with that version, "
            "or start a new run with the model that it exported"
        ) from error
