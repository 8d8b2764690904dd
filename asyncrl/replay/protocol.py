"""The replay seam: what a rollout worker and a learner rank may ask of the replay, whatever carries it.

`client/client.py` speaks it over ZeroMQ to the server process, `audit/rerun.py` plays a run that is over; tests put the
pure core itself behind it. Every wait is bounded by the caller and answers with whom it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.types import NO_VERSION, Assignment, DropReason, StepPlan, Trajectory, TrajectoryGroup

MOST_DROPPED = 16
MEMBER = "member_"
"""Before the reason of a member that its group was closed without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The rendezvous: a small dictionary the learner posts and every worker watches.

    `values` holds what is needed to receive weights (transport, store address, epoch, members, newest version);
    `revision` grows by one with every change.
    """

    revision: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A live rollout worker as the publisher sees it."""

    worker: str
    incarnation: str
    policy_version: int
    """Newest version it has verified and serves; NO_VERSION before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Reply to `acquire`. All lists may be empty; then `waiting_for` says why."""

    assignments: tuple[Assignment, ...] = ()
    evaluations: tuple[EvalAssignment, ...] = ()
    stop: bool = False
    """The run is over: finish nothing more, close and exit."""
    waiting_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertReply:
    status: str
    """`accepted`, `duplicate` (already there; treat as accepted), `fenced` (a newer attempt owns it), `closed` (the
    group is committed or dropped; whether with this very insert is forgotten) or `rejected`."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One rank's part of a sealed step."""

    plan: StepPlan
    trajectories: dict[tuple[int, int], Trajectory]
    """`(group position, trajectory position) -> Trajectory` for this rank's shard."""
    samples: tuple[TrajectoryGroup, ...] = ()
    """Rank 0 only: a few whole groups with their texts, for `samples.jsonl`; over the wire without their extras."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Reply to `restore`: from where the learner goes on."""

    next_step: int
    next_version: int
    """Larger than every version ever published in this run; versions are never reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedSample:
    """One member of a group that was never trained, or one that a group was closed without; to be read, its texts are
    cut."""

    group_id: int
    worker: str = ""
    prompt: str = ""
    completion: str = ""
    """Empty where nothing came of it."""
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    version_min: int = NO_VERSION
    version_max: int = NO_VERSION
    dropped: str = ""
    """The `DropReason`; after `MEMBER` where the group lives on without it."""
    detail: str = ""
    """What its maker said of it."""

    def line(self) -> dict[str, Any]:
        """For `samples.jsonl`, without what it does not have."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, NO_VERSION, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    metrics: dict[str, float] = field(default_factory=dict)
    """Ledger counts, staleness, waste by position, idle times: `replay/*`, `staleness/*`, `idle/*`."""
    evaluations: tuple[EvalSummary, ...] = ()
    """Evaluation jobs finished since the last call."""
    dropped: tuple[DroppedSample, ...] = ()
    """The first `MOST_DROPPED` of what was dropped since then and can be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """A process that the server has heard of and that has not said goodbye."""

    role: str
    name: str
    silent_s: float
    """Since it was last heard."""
    served: int
    """Policy version that a worker serves; NO_VERSION of others, and before its first."""
    held: int
    """Groups that a worker is making."""
    tokens_per_s: float
    """That a worker generated between its last two heartbeats."""
    still_s: float
    """Since a worker's last token or environment step; 0 of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A moment of a run, as its replay server tells it to a viewer: counts, times and words; no payload, no prompt, no
    incarnation, no address."""

    run: str
    clock: float
    """Seconds, of the server."""
    trained_steps: int
    committed_steps: int
    """Those that a checkpoint holds."""
    policy_version: int
    finished: bool
    waits: str
    """Whom the learner waits for; empty while it has a batch."""
    paused: str
    """Why nothing new is admitted; empty when nothing is wrong."""
    now: dict[str, float]
    """Of this moment, by the names of metrics: the states of groups, what was dropped, the queue by age."""
    last: dict[str, float]
    """The server's metrics of the last step that was trained since it started."""
    peers: tuple[PeerSeen, ...]
    """Those that have been silent for longest come first."""
    more_peers: int
    """That are not among them."""


class RolloutReplay(Protocol):
    """What a rollout worker uses, from its asyncio loop."""

    async def acquire(self, *, slots: int, wait_s: float) -> Acquired:
        """Up to `slots` new assignments; answers early when there is one, at the latest after `wait_s`."""
        ...

    async def insert(self, group: TrajectoryGroup, lost: DroppedSample | None = None) -> InsertReply:
        """Store a finished group. Idempotent; waits for byte credit; resent until acknowledged or fenced. `lost`: a
        member that it lacks, for `samples.jsonl`."""
        ...

    async def survey(self, rows: Sequence[int]) -> None:
        """So many rows each source of the prompts has: what a curriculum counts by. Repeating it is harmless.

        Raises:
            ReplayError: another worker of this run has said something else.
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
        """This attempt failed. The server re-issues it, or drops it with `reason` after the last attempt. `rewards`: of
        the members, of a group that was made and a filter dropped. `sample`: for `samples.jsonl`."""
        ...

    async def report_evaluation(self, result: EvalResult) -> None: ...

    async def served(self, policy_version: int, fingerprint: str) -> None:
        """The engine now serves this version: its fingerprint was recomputed here and matched."""
        ...

    async def watch(self, *, revision: int, wait_s: float) -> Board:
        """The board once its revision differs from `revision`, or unchanged after `wait_s`."""
        ...

    async def close(self) -> None: ...


class LearnerReplay(Protocol):
    """What a learner rank uses, blocking. Rank 0 makes every call; other ranks only `lease`."""

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

        Everything trained after `step` will be leased again as first planned, at the age it had then. With other
        `settings` (a digest) than the learner before it had, or as a `branch` (a checkpoint was chosen by hand), the
        groups are judged anew by their distance to the new weights; the prompts of those that are over-age now return
        to the stream.

        `run` is what a learner that is started again has in common with the one before, and no other: one of another
        that comes while that is heard of was started by mistake.
        """
        ...

    def publish(self, *, policy_version: int, parent: int) -> None:
        """A version exists outside any step: the initial or the restored weights. `parent` NO_VERSION for the first."""
        ...

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        """The batch of `step`. Idempotent; the first call seals it. May be asked one step ahead (prefetch).

        Raises:
            NoProgress: after `wait_s` without a group, a token or an environment step of any worker, counted from when
                the step before was trained; names whom it waited for, and who is silent since when.
        """
        ...

    def early(self, *, step: int, rank: int, world: int, after: int, upto: int, wait_s: float) -> Lease | None:
        """Of the groups that the next batch is certain to begin with (`begin_step` in `replay.core.batches`) those from
        `after` on: the plan of those alone, counted from 0, and this rank's trajectories. None if there are none within
        `wait_s`, or the batch is sealed. Reserves nothing: what is trained is what `lease` says.

        Args:
            upto: up to which group of the batch, as another rank was given it, sealed or not; 0: as many as there are.
        """
        ...

    def trained(self, *, step: int, policy_version: int, ess: Sequence[float] = ()) -> TrainedReply:
        """`step` was trained and its weights are `policy_version` (parent: the version before).

        Args:
            ess: of each group of the plan, in turn, for `replay.order=ess`: the effective sample size, as a share, of
                its tokens' importance weights, before the update that first trains it.
        """
        ...

    def commit(self, *, step: int) -> None:
        """The checkpoint of `step` is durable: payloads up to it may be forgotten."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """msgpack-able state for the checkpoint: prompt cursor, version tree, open groups, counters."""
        ...

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        """Start an evaluation job at `policy_version` or newer; returns its id. Results come with `trained`. It runs
        beside the training and holds nothing back; one of the same set that no worker has begun is cancelled for it.
        """
        ...

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        """Block until every open evaluation job is finished and return those not yet handed out.

        Raises:
            NoProgress: after `wait_s` without a row, a token or an environment step; names who is silent.
        """
        ...

    def announce(self, values: dict[str, Any]) -> None:
        """Merge `values` into the board."""
        ...

    def members(self) -> list[Member]: ...

    def finish(self) -> None:
        """Training is over: workers are told to stop, open groups are dropped with reason `shutdown`."""
        ...

    def close(self) -> None: ...
