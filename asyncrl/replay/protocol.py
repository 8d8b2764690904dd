"""The interface of the replay for rollout workers and learner ranks, independent of the transport.

`client/client.py` implements it over ZeroMQ to the server process, `audit/rerun.py` replays a finished run; tests put
the pure core itself behind it. Every wait is bounded by the caller, and reports whom it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.types import NO_VERSION, Assignment, DropReason, StepPlan, Trajectory, TrajectoryGroup

MOST_DROPPED = 16
MEMBER = "member_"
"""Prefix of the drop reason of a member that its group was closed without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The rendezvous: a small dictionary the learner posts and every worker watches.

    `values` holds what is needed to receive weights (transport, store address, epoch, members, newest version);
    `revision` increases by one with every change.
    """

    revision: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A live rollout worker as the publisher sees it."""

    worker: str
    incarnation: str
    policy_version: int
    """Newest policy version that it has verified and serves; NO_VERSION before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Reply to `acquire`. Both tuples may be empty; then `waiting_for` says why."""

    assignments: tuple[Assignment, ...] = ()
    evaluations: tuple[EvalAssignment, ...] = ()
    stop: bool = False
    """The run is over: finish nothing more, close and exit."""
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertReply:
    status: str
    """`accepted`, `duplicate` (already stored; treat as accepted), `fenced` (a newer attempt owns the group), `closed`
    (the group is committed or dropped; whether with this insert is no longer known) or `rejected`."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One rank's part of a sealed step."""

    plan: StepPlan
    trajectories: dict[tuple[int, int], Trajectory]
    """`(group position, trajectory position) -> Trajectory` for this rank's part of the batch."""
    samples: tuple[TrajectoryGroup, ...] = ()
    """On rank 0, a few whole groups with their texts, for `samples.jsonl`; sent over the network without extras."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Reply to `restore`: where the learner continues."""

    next_step: int
    next_version: int
    """Larger than every version published in this run so far; versions are never reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedSample:
    """One member of a group that was never trained, or one that its group was closed without. It is meant for reading;
    its texts are shortened."""

    group_id: int
    worker: str = ""
    prompt: str = ""
    completion: str = ""
    """Empty if nothing was generated."""
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    version_min: int = NO_VERSION
    version_max: int = NO_VERSION
    dropped: str = ""
    """The `DropReason`; with the prefix `MEMBER` if the group continues without this member."""
    detail: str = ""
    """Details given by the worker that reported it."""

    def line(self) -> dict[str, Any]:
        """Return the line for `samples.jsonl`, without empty fields."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, NO_VERSION, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    metrics: dict[str, float] = field(default_factory=dict)
    """Ledger counts, staleness, waste by position, idle times: `replay/*`, `staleness/*`, `idle/*`."""
    evaluations: tuple[EvalSummary, ...] = ()
    """Evaluation jobs finished since the last call."""
    dropped: tuple[DroppedSample, ...] = ()
    """The first `MOST_DROPPED` samples of groups and members dropped since then."""


class RolloutReplay(Protocol):
    """Interface of a rollout worker, called from its asyncio loop."""

    async def acquire(self, *, slots: int, wait_s: float) -> Acquired:
        """Return up to `slots` new assignments, as soon as there is one, at the latest after `wait_s` seconds."""
        ...

    async def insert(self, group: TrajectoryGroup, lost: DroppedSample | None = None) -> InsertReply:
        """Store a finished group. Idempotent; waits for byte credit; resent until acknowledged or fenced. `lost` is a
        member that the group lacks, for `samples.jsonl`."""
        ...

    async def survey(self, rows: Sequence[int]) -> None:
        """Report the number of rows of each prompt source, which a curriculum needs. Idempotent.

        Raises:
            ReplayError: another worker of this run has reported different numbers.
        """
        ...

    async def fail(
        self,
        assignment: Assignment,
        reason: DropReason,
        detail: str,
        rewards: Sequence[float] = (),
        sample: DroppedSample | None = None,
    ) -> None:
        """Report a failed attempt. The server re-issues the assignment, or drops it with `reason` after the last
        attempt. `rewards` are those of the members if the group was generated and a filter dropped it. `sample` is for
        `samples.jsonl`."""
        ...

    async def report_evaluation(self, result: EvalResult) -> None: ...

    async def close(self) -> None: ...


class LearnerReplay(Protocol):
    """Blocking interface of a learner rank. Rank 0 makes every call; other ranks only `lease`."""

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
        """Announce this incarnation of the learner. `step` is the last step in its checkpoint (None: a fresh start),
        `policy_version` the version of those weights (NO_VERSION: none). `snapshot` (saved in the checkpoint) fills a
        server without memory of the run.

        Everything trained after `step` will be leased again as first planned, at the staleness it had then. If
        `settings` (a digest) differ from the previous learner's, or on a `branch` (a checkpoint was chosen by hand),
        groups are judged anew by their distance to the new weights, and the prompts of those that are now over-age
        return to the stream.

        `run` is the same for a learner and its restarts, and different for any other. A learner with another `run` that
        arrives while the present one is still heard from was started by mistake.
        """
        ...

    def publish(self, *, policy_version: int, parent: int) -> None:
        """Report a version from outside any step: the initial or restored weights. `parent` is NO_VERSION for the
        first."""
        ...

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        """Return the batch of `step`. Idempotent; the first call seals it. May be called one step ahead (prefetch).

        Raises:
            NoProgress: after `wait_s` seconds without a group, a token or an environment step of any worker, counted
                from when the previous step was trained; names whom it waited for, and who has been silent since when.
        """
        ...

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        """Report that `step` was trained, and that its weights are `policy_version` (parent: the previous version)."""
        ...

    def commit(self, *, step: int) -> None:
        """Report that the checkpoint of `step` is durable: payloads up to it may be deleted."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the state for the checkpoint, which msgpack can encode: prompt cursor, version tree, open groups,
        counters."""
        ...

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        """Start an evaluation job at `policy_version` or newer; returns its id. Results come with `trained`. It runs
        concurrently with training and does not delay it; a job of the same set that no worker has begun is cancelled.
        """
        ...

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        """Block until every open evaluation job is finished and return those not yet handed out.

        Raises:
            NoProgress: after `wait_s` seconds without a row, a token or an environment step; names who is silent.
        """
        ...

    def announce(self, values: dict[str, Any]) -> None:
        """Merge `values` into the board."""
        ...

    def members(self) -> list[Member]: ...

    def finish(self) -> None:
        """End the training: workers are told to stop, and open groups are dropped with reason `shutdown`."""
        ...

    def close(self) -> None: ...
