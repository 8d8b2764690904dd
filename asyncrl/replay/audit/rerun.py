"""The replay of a run that is over, served again from its retained journal (`replay.journal.retain=all`).

The batches are those of the surviving history: what a rollback of the learner undid is left out, and a step that was
planned again is served as it was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.balance import shard_step
from asyncrl.errors import JournalError, ReplayError
from asyncrl.evaluation.orders import EvalSummary
from asyncrl.replay.codec.columns import decode
from asyncrl.replay.codec.group import StoredGroup, group_of, join_texts
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.siblings import joined
from asyncrl.replay.core.durable.state import plan_of
from asyncrl.replay.core.durable.versions import VersionTree
from asyncrl.replay.journal.disk import FolderDisk
from asyncrl.replay.journal.recovery import read_event, read_journal
from asyncrl.replay.protocol import Lease, Member, Restored, TrainedReply
from asyncrl.types import NO_VERSION, GroupHeader, StepPlan, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step of the surviving history."""

    sealed: ev.Sealed
    places: tuple[tuple[int, ...], ...]
    """For each group in order: the journal positions of its payload, or of the payloads of its members."""


@dataclass(frozen=True, slots=True)
class Part:
    """What was inserted at once: a group, or a member of one."""

    header: GroupHeader
    stored: StoredGroup

    def whole(self) -> list[Trajectory]:
        return self.stored.trajectories(self.header.trajectories)


@dataclass(frozen=True, slots=True)
class History:
    steps: tuple[TrainedStep, ...]
    tree: VersionTree
    settings: dict[str, Any]
    """The admission settings of the run."""


def read_surviving(journal: Path) -> History:
    """The steps that the run's final weights are made of.

    Raises:
        JournalError: the journal is damaged, or its beginning was recycled.
    """
    tree, version, again = VersionTree(), NO_VERSION, False
    places: dict[int, int] = {}
    sealed: dict[int, TrainedStep] = {}
    trained: dict[int, TrainedStep] = {}
    settings: dict[str, Any] = {}
    whose: dict[int, int] = {}
    """Members of groups that were admitted by sample -> the first of them."""
    for position, event in read_journal(journal):
        match event:
            case ev.Snapshotted(previous_end=end) if end >= 0:
                raise JournalError(
                    f"{journal} does not reach back to the first step. A rerun needs a run with "
                    "replay.journal.retain=all"
                )
            case ev.Snapshotted(run=run):
                settings = run["settings"]
            case ev.Configured(settings=settings):
                pass
            case ev.Begun(first=first, members=count):
                whose |= dict.fromkeys(range(first, first + count), first)
            case ev.Inserted(header=header):
                places[header.group_id] = position
            case ev.Sealed(step=step, members=members):
                groups = itertools.groupby(members, key=lambda member: whose.get(member, member))
                sealed[step] = TrainedStep(event, tuple(tuple(places[each] for each in group) for _, group in groups))
            case ev.Published(policy_version=number, parent=parent):
                tree.publish(number, parent, length=0, again=again)
                version = number
            case ev.Trained(step=step, policy_version=number):
                trained[step] = sealed[step]
                tree.publish(number, version)
                version = number
            case ev.Restored(step=last, policy_version=version, again=again):
                trained = {step: what for step, what in trained.items() if step <= last}
            case ev.Reloaded(snapshot=snapshot):
                trained = {step: what for step, what in trained.items() if step <= snapshot["step"]}
                whose |= {member: first for member, first, _ in snapshot["siblings"]}
                known = VersionTree.restore(snapshot["tree"])
                tree = known if known.newest >= tree.newest else tree
    steps = tuple(trained[step] for step in sorted(trained))
    if [step.sealed.step for step in steps] != list(range(len(steps))):
        raise JournalError(f"{journal} lacks some of the trained steps. Run `asyncrl audit` on it")
    return History(steps, tree, settings)


class RetainedReplay:
    """`LearnerReplay` over a history. `max_staleness` may differ from the run's: a smaller one masks more tokens, a
    larger one fewer; groups that the run dropped stay dropped.

    Args:
        samples: number of whole groups with texts that rank 0 gets with a lease, for `samples.jsonl`.
    """

    def __init__(self, journal: Path, history: History, *, max_staleness: int, samples: int, updates: int = 1) -> None:
        self._updates, self._samples = updates, samples
        self._disk = FolderDisk(journal, locked=False)
        self._history, self._bound = history, max_staleness

    def restore(
        self,
        *,
        step: int | None,
        policy_version: int,
        snapshot: dict[str, Any] | None,
        settings: str = "",
        branch: bool = False,
        run: str = "",
    ) -> Restored:
        return Restored(next_step=0, next_version=0)

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        """The batch of `step`; `wait_s` is of no use here.

        Raises:
            ReplayError: the run trained fewer steps. JournalError: a payload is damaged.
        """
        plan, stored = self._read(step)
        plan = replace(plan, shards=shard_step(plan, world, self._updates))
        samples = range(min(self._samples, len(stored))) if rank == 0 else ()
        wanted = {g for g, _ in plan.shards[rank]}
        decoded = {g: [each for part in stored[g] for each in part.whole()] for g in wanted}
        return Lease(
            plan=plan,
            trajectories={(g, t): decoded[g][t] for g, t in plan.shards[rank]},
            samples=tuple(_sample(plan.groups[g], stored[g]) for g in samples),
        )

    def _read(self, step: int) -> tuple[StepPlan, list[list[Part]]]:
        if step >= len(self._history.steps):
            raise ReplayError(f"step {step} was never trained: the journal has {len(self._history.steps)} steps")
        what = self._history.steps[step]
        inserted = [[self._inserted(position) for position in group] for group in what.places]
        headers = tuple(joined([event.header for event in group]) for group in inserted)
        plan = plan_of(replace(what.sealed, max_staleness=self._bound), headers, self._history.tree)
        return plan, [[Part(event.header, event.payload) for event in group] for group in inserted]

    def _inserted(self, position: int) -> ev.Inserted:
        event = read_event(self._disk, position)
        if not isinstance(event, ev.Inserted):
            raise JournalError(f"the group at journal position {position} is damaged. Run `asyncrl audit`")
        return event

    def publish(self, *, policy_version: int, parent: int) -> None:
        return

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        return TrainedReply()

    def commit(self, *, step: int) -> None:
        return

    def snapshot(self) -> dict[str, Any]:
        return {}

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        raise ReplayError("a rerun has no evaluations, because nothing is generated in it")

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        return ()

    def announce(self, values: dict[str, Any]) -> None:
        return

    def members(self) -> list[Member]:
        return []

    def finish(self) -> None:
        return

    def close(self) -> None:
        self._disk.close()


def _sample(header: GroupHeader, parts: Sequence[Part]) -> TrajectoryGroup:
    trajectories = [each for part in parts for each in decode(part.header.trajectories, part.stored.columns)]
    return group_of(header, join_texts([part.stored.texts for part in parts]), trajectories)
