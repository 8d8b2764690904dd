"""Batches of rows in the form that the learner packs: each row is a group of one trajectory.

The rows of a step follow from the settings, the seed and the position of the run; no other randomness is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash

from asyncrl.balance import shard_step
from asyncrl.drawing.order import DrawOrder
from asyncrl.errors import CheckpointDamagedError, CheckpointMismatchError, OverlongError
from asyncrl.replay.protocol import Lease
from asyncrl.sft.examples import Example, Examples
from asyncrl.storage.checkpoints import REPLAY_FILE, SUPERVISED
from asyncrl.types import NO_VERSION, GroupHeader, StepPlan, Trajectory, TrajectoryHeader

VERSION = 0
"""Policy version of every trained token; there is only one policy."""


def draws_before(checkpoint: Path | None) -> int:
    """The number of draws in a checkpoint's snapshot; 0 for None.

    Raises:
        CheckpointDamagedError: it cannot be read. CheckpointMismatchError: reinforcement learning saved it.
    """
    if checkpoint is None:
        return 0
    try:
        found = msgpack.unpackb((checkpoint / REPLAY_FILE).read_bytes(), strict_map_key=False)
        schema = found["schema"]
        draws = int(found["draw"]) if schema == SUPERVISED else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise CheckpointDamagedError(
            f"{checkpoint / REPLAY_FILE} cannot be read ({error!r}). Resume from another checkpoint: resume=PATH"
        ) from error
    if schema != SUPERVISED:
        raise CheckpointMismatchError(
            f"{checkpoint} was saved by reinforcement learning, which drew other rows. To start from its weights, set "
            f"model.path={checkpoint.parent.parent / 'hf'}"
        )
    return draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The draws of each step of a run, from the position where it was resumed."""

    rows: int
    """Number of rows in an epoch."""
    rows_per_step: int
    draws: int
    """Number of draws in the whole run."""
    first_step: int = 0
    """First step of this start of the run."""
    first_draw: int = 0
    """Number of draws taken before `first_step`."""

    @classmethod
    def of(cls, rows: int, rows_per_step: int, epochs: float, steps: int, *, step: int = 0, draw: int = 0) -> Course:
        """The course of a run, from where it resumes.

        Args:
            epochs, steps: as in the settings; if `steps` is above 0 it replaces epochs.
            step, draw: position from which the run resumes.
        """
        draws = draw + max(0, steps - step) * rows_per_step if steps else max(1, math.ceil(epochs * rows))
        return cls(rows=rows, rows_per_step=rows_per_step, draws=draws, first_step=step, first_draw=draw)

    @property
    def steps(self) -> int:
        """Number of steps in the whole run."""
        return self.first_step + max(0, -(-(self.draws - self.first_draw) // self.rows_per_step))

    def window(self, step: int) -> range:
        """The draws of a step; the last step may have fewer."""
        start = self.first_draw + (step - self.first_step) * self.rows_per_step
        return range(start, min(start + self.rows_per_step, self.draws))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Statistics of the rows of a step."""

    rows: int
    """Number of rows that are trained on."""
    dropped: int
    """Number of rows dropped as overlong."""
    cut: int
    tokens: int
    epoch: float
    """Passes over the data, including this step."""
    digest: str
    """Digest of all tokens and loss masks, equal on every rank."""


class RowBatches:
    """Implements `prefetch.Source`. Gives the same batch to every rank, and again if a step is requested again."""

    def __init__(self, examples: Examples, order: DrawOrder, course: Course) -> None:
        self._examples, self._order, self.course = examples, order, course
        self._drawn: dict[int, Drawn] = {}
        self._trained = course.first_draw

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        """This rank's part of `step`. Raises DataError if a row cannot be used."""
        found: list[Example] = []
        dropped = 0
        window = self.course.window(step)
        for index in window:
            drawn = self._order[index]
            try:
                found.append(self._examples.example(drawn.source, drawn.row))
            except OverlongError:
                dropped += 1
        self._drawn[step] = Drawn(
            rows=len(found),
            dropped=dropped,
            cut=sum(each.rendered > len(each.token_ids) for each in found),
            tokens=sum(len(each.token_ids) for each in found),
            epoch=window.stop / self.course.rows,
            digest=digest_of(found),
        )
        return lease_of(step, found, rank=rank, world=world)

    def told(self, step: int) -> Drawn:
        """Return the statistics of a leased step, once, when it is trained."""
        self._trained = self.course.window(step).stop
        return self._drawn.pop(step)

    def snapshot(self) -> dict[str, Any]:
        """The part of a checkpoint about the rows: the number of draws before it."""
        return {"schema": SUPERVISED, "draw": self._trained}

    def commit(self, *, step: int) -> None:
        """Nothing to delete: rows are read from their files."""


def digest_of(examples: Iterable[Example]) -> str:
    """Digest of the examples, as 16 hex digits."""
    digest = xxhash.xxh3_64()
    for each in examples:
        digest.update(len(each.token_ids).to_bytes(8, "little"))
        digest.update(each.token_ids.tobytes())
        digest.update(each.loss_mask.tobytes())
    return digest.hexdigest()


def lease_of(step: int, examples: Sequence[Example], *, rank: int, world: int) -> Lease:
    """A lease as a replay would make it: balanced over the ranks by tokens."""
    headers = tuple(
        GroupHeader(group_id=place, prompt_index=place, attempt=0, worker="", trajectories=(_header(each),))
        for place, each in enumerate(examples)
    )
    plan = StepPlan(
        step=step, policy_version=VERSION, groups=headers, staleness={VERSION: 0}, max_staleness=0, shards=()
    )
    plan = replace(plan, shards=shard_step(plan, world))
    return Lease(plan=plan, trajectories={(g, t): _trajectory(examples[g]) for g, t in plan.shards[rank]})


def _header(example: Example) -> TrajectoryHeader:
    return TrajectoryHeader(
        length=len(example.token_ids),
        prompt_length=int(np.argmax(example.loss_mask)),
        reward=0.0,
        version_tokens=((VERSION, example.loss_tokens),),
    )


def _trajectory(example: Example) -> Trajectory:
    return Trajectory(
        token_ids=example.token_ids,
        loss_mask=example.loss_mask,
        behavior_logprobs=np.zeros(len(example.token_ids), np.float32),
        policy_versions=np.where(example.loss_mask, VERSION, NO_VERSION).astype(np.int32),
        reward=0.0,
    )
