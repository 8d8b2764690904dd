"""The clients of the replay server: `RolloutClient` for a worker's asyncio loop, `LearnerClient` for a rank.

Both are thin: they encode arguments, call `Connection.request`, and decode and check the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from asyncrl.collector import resting
from asyncrl.evaluation.orders import EvalResult, EvalSummary
from asyncrl.replay.client.connection import Connection
from asyncrl.replay.client.futures import Futures
from asyncrl.replay.client.requests import Response
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.group import encode_group
from asyncrl.replay.codec.lease import SAMPLE_GROUPS, Unpacking
from asyncrl.replay.protocol import (
    Acquired,
    Board,
    DroppedSample,
    InsertReply,
    Lease,
    Member,
    Restored,
    TrainedReply,
)
from asyncrl.settings.replay import ReplayConfig
from asyncrl.types import Assignment, DropReason, TrajectoryGroup

MOST_SAMPLE_GROUPS = 4096
"""Limit of the server on the whole groups of one lease."""


class WorkerRendezvous:
    """How a worker learns of versions, and reports which it serves; blocking, for the weight subscriber's thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def watch(self, revision: int, wait_s: float) -> Board:
        """Return the board once its revision differs from `revision`, or unchanged after `wait_s` seconds."""
        return _board(self._connection.request("watch", [revision, float(wait_s)]).result().body)

    def served(self, policy_version: int, fingerprint: str) -> None:
        """Report that the engine now serves this version: the fingerprint was recomputed by the worker and matched."""
        self._connection.request("served", [policy_version, fingerprint]).result()
        self._connection.served = max(self._connection.served, policy_version)


class RolloutClient:
    """`RolloutReplay` over ZeroMQ. `stats` returns the worker's cumulative counters; see `ReplayCore.heartbeat`."""

    def __init__(
        self,
        address: str,
        *,
        worker: str,
        run_digest: str,
        config: ReplayConfig,
        stats: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._connection = Connection(
            address, role="worker", name=worker, run_digest=run_digest, config=config, stats=stats
        )
        self._rendezvous = WorkerRendezvous(self._connection)
        self._futures = Futures()

    @property
    def incarnation(self) -> str:
        """Random per client object; the board's member list names workers by it."""
        return self._connection.incarnation

    def rendezvous(self) -> WorkerRendezvous:
        return self._rendezvous

    async def acquire(self, *, slots: int, wait_s: float) -> Acquired:
        future = self._connection.request("acquire", [slots, float(wait_s)])
        try:
            response = await self._futures.of(future)
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise
        return messages.decode_record(Acquired, response.body)

    def _give_back(self, future: Future[Response]) -> None:
        """Fail assignments that arrived after the caller was cancelled: they would stay with this worker forever."""
        if future.exception() is None:
            for assignment in messages.decode_record(Acquired, future.result().body).assignments:
                why = [DropReason.SHUTDOWN.value, "acquire was cancelled", [], None]
                self._connection.request("fail", [messages.encode_record(assignment), *why])

    async def insert(self, group: TrajectoryGroup, lost: DroppedSample | None = None) -> InsertReply:
        encoded = encode_group(group)
        body = [headers.encode_group_header(encoded.header), messages.encode_dropped(lost)]
        request = self._connection.request("insert", body, encoded.frames, encoded.header.nbytes)
        *reply, _ = wire.sequence((await self._futures.of(request)).body, "insert reply", 3)
        return messages.decode_record(InsertReply, reply)

    async def survey(self, rows: Sequence[int]) -> None:
        await self._futures.of(self._connection.request("survey", list(rows)))

    async def fail(
        self,
        assignment: Assignment,
        reason: DropReason,
        detail: str,
        rewards: Sequence[float] = (),
        sample: DroppedSample | None = None,
    ) -> None:
        kept = messages.encode_dropped(sample)
        body = [messages.encode_record(assignment), reason.value, detail[: wire.MAX_TEXT], list(rewards), kept]
        await self._futures.of(self._connection.request("fail", body))

    async def report_evaluation(self, result: EvalResult) -> None:
        await self._futures.of(self._connection.request("report_evaluation", messages.encode_record(result)))

    async def close(self) -> None:
        await asyncio.to_thread(self._connection.close)


class LearnerClient:
    """`LearnerReplay` over ZeroMQ; blocking, safe to call from several threads.

    Args:
        samples: number of whole groups with texts that rank 0 gets with a lease, for `samples.jsonl`.
    """

    def __init__(
        self, address: str, *, rank: int, run_digest: str, config: ReplayConfig, samples: int = SAMPLE_GROUPS
    ) -> None:
        self.address = address
        self._samples = min(samples, MOST_SAMPLE_GROUPS) if rank == 0 else 0
        self._told: set[int] = set()
        """Evaluation jobs whose results were returned. A server that restarts before it knows of the delivery repeats
        them."""
        self._connection = Connection(
            address, role="learner", name=f"rank {rank}", run_digest=run_digest, config=config
        )

    def _ask(self, verb: str, body: Any = None) -> Any:
        return self._connection.request(verb, body).result().body

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
        asked = [step, policy_version, snapshot, settings, branch, run]
        return messages.decode_record(Restored, self._ask("restore", asked))

    def publish(self, *, policy_version: int, parent: int) -> None:
        self._ask("publish", [policy_version, parent])

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        request = self._connection.request("lease", [step, rank, world, float(wait_s), self._samples])
        return decode_lease(request.result(), rank)

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        reply = messages.decode_record(TrainedReply, self._ask("trained", [step, policy_version]))
        return replace(reply, evaluations=self._untold(reply.evaluations))

    def commit(self, *, step: int) -> None:
        self._ask("commit", step)

    def snapshot(self) -> dict[str, Any]:
        return wire.mapping(self._ask("snapshot"), "snapshot")

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        return wire.integer(self._ask("evaluate", [step, policy_version, eval_set, rows, chunk]), "job", 0, wire.MAX_ID)

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        return self._untold(messages.decode_records(EvalSummary, self._ask("wait_evaluations", float(wait_s))))

    def _untold(self, summaries: Sequence[EvalSummary]) -> tuple[EvalSummary, ...]:
        fresh = tuple(summary for summary in summaries if summary.job_id not in self._told)
        self._told.update(summary.job_id for summary in fresh)
        return fresh

    def announce(self, values: dict[str, Any]) -> None:
        self._ask("announce", values)

    def members(self) -> list[Member]:
        return list(messages.decode_records(Member, self._ask("members")))

    def watch(self, *, revision: int, wait_s: float) -> Board:
        return _board(self._ask("watch", [revision, float(wait_s)]))

    def finish(self) -> None:
        self._ask("finish")

    def close(self) -> None:
        self._connection.close()


def _board(body: Any) -> Board:
    board = messages.decode_record(Board, body)
    wire.integer(board.revision, "revision", 0, wire.MAX_ID)
    return board


def decode_lease(response: Response, rank: int) -> Lease:
    """Return one rank's trajectories, each checked against the header by which it was judged.

    Raises:
        WireError: a trajectory is missing, or does not agree with its header.
    """
    encoded_plan, *parcel = wire.sequence(response.body, "lease", 4)
    with resting():
        unpacking = Unpacking(headers.decode_plan(encoded_plan))
        unpacking.open(parcel, response.frames)
        return unpacking.lease(rank)
