"""The workers' side of the core: live workers, their assignments and their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncrl.drawing.curriculum import too_many
from asyncrl.errors import ReplayError
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.replay.core.admission import may_admit
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.durable.ledger import Entry, GroupState
from asyncrl.replay.core.live.workers import Worker
from asyncrl.replay.core.requests.fair_share import assignment_seed, fair_share, is_recent, window_of
from asyncrl.replay.core.requests.retries import Retries
from asyncrl.replay.core.requests.space import Space
from asyncrl.replay.core.run import Run
from asyncrl.replay.protocol import Acquired, InsertReply, Member
from asyncrl.types import NO_VERSION, Assignment, DropReason, GroupHeader

MAX_DETAIL = 200
"""Limit on the characters of a worker's message that the journal keeps."""


class UnknownPeer(ReplayError):
    """The server does not know this incarnation (any more): it has to say hello and repeat its request."""


class Rollouts:
    """Handles every request of a rollout worker."""

    def __init__(self, run: Run, retries: Retries, space: Space) -> None:
        self._run, self._state, self._retries, self._space = run, run.state, retries, space
        self._ready: tuple[tuple[int, int], int, int] = ((NO_VERSION, -1), 0, 0)
        """Cache: ((policy version, revision of the workers), capacity of the ready workers, number of them that have
        not asked yet). With a thousand workers, computing it for each request would be most of the server's work."""
        self._settled_at = self._resumed_by = -math.inf
        self._known_before: frozenset[str] = frozenset()
        """Newest incarnations of the workers that this server knew before it was restarted."""

    def hello(self, worker: str, incarnation: str, served: int = NO_VERSION) -> None:
        """Register a worker. Raises FencedError if a newer incarnation of it has taken over."""
        self._run.refuse_replaced(worker, incarnation)
        replaced = self._run.workers.hello(worker, incarnation, served, self._run.clock())
        if self._state.peers.newest(worker) != incarnation:
            self._run.record(ev.Joined(worker, incarnation))
        if replaced is not None:
            self._retries.release(replaced)

    def heartbeat(self, worker: str, incarnation: str, stats: dict[str, float]) -> None:
        """Store a worker's `stats`, cumulative since its start; only those in `workers.KEPT` are used."""
        member = self._worker(worker, incarnation)
        self._run.workers.report(member, stats, self._run.clock(), counted_before=incarnation in self._known_before)

    def goodbye(self, worker: str, incarnation: str) -> None:
        """Remove a worker that leaves in order: its groups go to others, without counting as failed."""
        self._remove(self._run.workers.get(worker, incarnation), counted=False)

    def expel(self, worker: str, incarnation: str) -> None:
        """Remove a worker that is not to be trusted: its groups go to others, as if it had become silent."""
        self._remove(self._run.workers.get(worker, incarnation))

    def _remove(self, member: Worker | None, *, counted: bool = True) -> None:
        if member is not None:
            self._run.workers.remove(member.name)
            self._retries.release(member, counted=counted)

    def expire(self) -> list[str]:
        """Remove silent workers and return their names. Assignments held for too long go to others too; a late result
        of theirs is fenced."""
        self._retries.reissue_overdue()
        gone = self._run.workers.silent(self._run.clock())
        for member in gone:
            self._remove(member)
        return [member.name for member in gone]

    def acquire(self, worker: str, incarnation: str, slots: int, request: int = -1) -> Acquired:
        """Return up to `slots` assignments for this worker, evaluations first; if none, `waiting_for` says why. A
        `request` that was answered before and is repeated (after a restart of the server) gets the same assignments."""
        # Not counted as a sign of life: the server repeats a waiting request by itself, even for a stopped worker.
        member = self._member(worker, incarnation)
        answered = self._answered(member, request)
        if answered:
            return Acquired(assignments=answered)
        if self._state.finished:
            return Acquired(
                stop=self._is_over(incarnation), waiting_for="the learner: the run is over unless it is resumed"
            )
        self._run.workers.note(member, capacity=len(member.held) + max(0, slots))
        evaluation = self._run.evaluations.next_for(worker, member.served) if slots > 0 else None
        evaluations: tuple[EvalAssignment, ...] = (evaluation,) if evaluation else ()
        waiting_for = self._why_not(member)
        assignments: list[Assignment] = []
        room = min(slots - len(evaluations), self._share(member) - len(member.held))
        while not waiting_for and len(assignments) < room:
            issued = self._issue(member, request)
            if issued is None:
                waiting_for = "the learner: rollouts are as far ahead of it as replay.pipeline_depth allows"
                break
            assignments.append(issued)
        return Acquired(assignments=tuple(assignments), evaluations=evaluations, waiting_for=waiting_for)

    def has_work(self) -> bool:
        """Whether any waiting `acquire` could be answered. Cheap, since most workers wait most of the time."""
        state = self._state
        if state.finished or self._run.evaluations.wanted:
            return True
        if state.version == NO_VERSION or self._is_unsurveyed():
            return False
        if state.replays(self._run.settings.pipeline_depth):
            return False
        return bool(state.pending) or self._may_begin()

    def may_take(self, worker: str, incarnation: str) -> bool:
        """Whether this worker could get some of the available work, or must get another answer. Cheap, like `has_work`:
        most waiting workers hold their share."""
        member = self._run.workers.get(worker, incarnation)
        if member is None or self._state.finished or self._run.evaluations.wanted:
            return True
        return is_recent(member.served, self._state, self._run.settings) and len(member.held) < self._share(member)

    def insert(self, worker: str, incarnation: str, header: GroupHeader, payload: Any) -> InsertReply:
        """Store a finished group. Idempotent; `payload` is kept until commit or drop."""
        self._worker(worker, incarnation)
        state = self._state
        entry = state.ledger.entries.get(header.group_id)
        if entry is None:
            # A committed or dropped group is forgotten, including which of its attempts was accepted.
            known = header.group_id < state.next_group_id
            return InsertReply(status="closed" if known else "rejected", reason=f"group {header.group_id} is not open")
        if entry.attempt != header.attempt or entry.incarnation != incarnation:
            return InsertReply(status="fenced", reason=f"group {header.group_id} was assigned to another attempt")
        if entry.state is not GroupState.IN_FLIGHT:
            return InsertReply(status="duplicate")
        problem = self._refuse(entry, header)
        if problem:
            self._retries.end(entry, DropReason.REJECTED)
            return InsertReply(status="rejected", reason=problem)
        self._retries.let_go(entry)
        self._run.record(ev.Inserted(header, payload, self._measured(header.member_rewards)))
        self._run.meter.insert(header)
        if not entry.siblings:
            self._run.meter.whole(header.member_rewards, missing=self._run.settings.group_size - header.members)
        self._space.make_room()
        return InsertReply(status="accepted")

    def survey(self, worker: str, incarnation: str, rows: Sequence[int]) -> None:
        """Record the number of rows of each prompt source. Needed only for a curriculum.

        Raises:
            ReplayError: `rows` differs from what an earlier worker of this run reported, or does not match the sources
                in the settings.
        """
        self._worker(worker, incarnation)
        wanted, draws = self._run.settings.curriculum, self._state.draws
        if draws is not None and tuple(rows) != draws.rows:
            raise ReplayError(
                f"worker {worker!r} has {list(rows)} rows to draw from, but the run began with {list(draws.rows)}. "
                "data.path, data.mixture and data.where must select the same rows on every machine"
            )
        if wanted is None or draws is not None:
            return
        if len(rows) != len(wanted.weights) or min(rows, default=0) < 1:
            raise ReplayError(f"worker {worker!r} has rows {list(rows)} for {len(wanted.weights)} sources of prompts")
        if why := too_many(sum(rows)):
            raise ReplayError(why)
        order = {"weights": list(wanted.weights), "seed": self._run.seed % 2**64, "shuffle": wanted.shuffle}
        self._run.record(ev.Surveyed(tuple(rows), order))

    def fail(
        self,
        worker: str,
        incarnation: str,
        group_id: int,
        attempt: int,
        reason: DropReason,
        detail: str = "",
        rewards: Sequence[float] = (),
    ) -> None:
        """Report a failed attempt. Late or repeated reports have no effect.

        Args:
            rewards: the members' rewards, if the group was finished but is unwanted; else empty.
            detail: the cause; for `filtered`, the filter's name and, after a colon, its reason. Kept for the last
                attempt.
        """
        self._worker(worker, incarnation)
        entry = self._state.held.get(group_id)
        if entry is None or entry.attempt != attempt or entry.incarnation != incarnation:
            return
        if reason is DropReason.FILTERED:
            self._run.meter.drop_filtered(detail.partition(":")[0][:MAX_DETAIL])
        self._run.meter.measured(rewards)
        pass_rate = self._measured(rewards)
        # A worker reports incomplete only after it has retried the missing members as often as a group may be tried.
        if reason in (DropReason.FILTERED, DropReason.INCOMPLETE):
            self._retries.drop(entry, reason, detail=detail[:MAX_DETAIL], pass_rate=pass_rate)
        else:
            self._retries.end(entry, reason, detail[:MAX_DETAIL], pass_rate)

    def served(self, worker: str, incarnation: str, policy_version: int, fingerprint: str) -> None:
        """Record the version that a worker serves. Raises ReplayError if that version was never published."""
        member = self._worker(worker, incarnation)
        if policy_version not in self._state.tree:
            raise ReplayError(f"worker {worker!r} serves policy_version {policy_version}, which was never published")
        self._run.workers.note(member, served=policy_version)
        member.fingerprint = fingerprint

    def report_evaluation(self, worker: str, incarnation: str, result: EvalResult) -> None:
        """Store an evaluation result. Raises ReplayError if it does not match its chunk, or has tokens of versions that
        were never published."""
        self._worker(worker, incarnation)
        for version in (result.version_min, result.version_max):
            if version != NO_VERSION and version not in self._state.tree:
                raise ReplayError(f"an evaluation has tokens of policy_version {version}, which was never published")
        self._run.evaluations.report(worker, result)

    def members(self) -> list[Member]:
        return self._run.workers.members()

    def take_over(self, settle_s: float = 0.0, resume_s: float = 0.0) -> None:
        """After recovery, treat workers that hold groups as alive until they are silent for too long.

        Args:
            settle_s: seconds in which workers may still reconnect, so that the list of members is not reliable.
            resume_s: seconds in which a finished run may still be resumed, and new workers are kept waiting.
        """
        now = self._run.clock()
        self._settled_at = now + settle_s
        self._resumed_by = now + resume_s if self._state.finished else -math.inf
        self._known_before = frozenset(names[-1] for names in self._state.peers.workers.values())
        for job in list(self._state.peers.evaluations.values()):
            for older in self._run.evaluations.start(job):
                self._run.record(ev.EvaluationClosed(older))
        for entry in list(self._state.held.values()):
            if entry.incarnation != self._state.peers.newest(entry.worker):
                self._retries.end(entry, DropReason.WORKER_LOST)
                continue
            self._run.workers.hello(entry.worker, entry.incarnation, NO_VERSION, self._run.clock())
            self._run.workers.live[entry.worker].held.add(entry.group_id)

    def settle_s(self) -> float:
        """Return the seconds until `members` is reliable after a restart."""
        return max(0.0, self._settled_at - self._run.clock())

    def _is_over(self, incarnation: str) -> bool:
        """Whether a worker should stop. After a restart, a new worker belongs to a run that is being resumed."""
        if not self._state.finished:
            return False
        return incarnation in self._known_before or self._run.clock() >= self._resumed_by

    def _member(self, worker: str, incarnation: str) -> Worker:
        self._run.refuse_replaced(worker, incarnation)
        member = self._run.workers.get(worker, incarnation)
        if member is None:
            raise UnknownPeer(f"worker {worker!r} is not known here. It must say hello first")
        return member

    def _worker(self, worker: str, incarnation: str) -> Worker:
        """Return the live worker and count this request as a sign of life."""
        member = self._member(worker, incarnation)
        member.seen = self._run.clock()
        return member

    def _why_not(self, member: Worker) -> str:
        if self._state.version == NO_VERSION:
            return "the learner: it has not published any weights yet"
        if self._is_unsurveyed():
            return "a rollout worker: data.curriculum is set, and no worker has reported yet how many rows there are"
        if self._state.replays(self._run.settings.pipeline_depth):
            return "the learner: it repeats the steps after its checkpoint"
        if not is_recent(member.served, self._state, self._run.settings):
            return f"weights: version {self._state.version} is published, but this worker serves {member.served}"
        if len(member.held) >= self._share(member):
            return "the other workers: this one already has its share of the groups in flight"
        return ""

    def _is_unsurveyed(self) -> bool:
        return self._run.settings.curriculum is not None and self._state.draws is None

    def _measured(self, rewards: Sequence[float]) -> float:
        wanted = self._run.settings.curriculum
        return -1.0 if wanted is None or not rewards else wanted.rate_of(rewards)

    def _share(self, member: Worker) -> int:
        key = (self._state.version, self._run.workers.revision)
        if key != self._ready[0]:
            window = window_of(self._run.settings)
            known = unknown = 0
            for (served, capacity), count in self._run.workers.claims.items():
                if is_recent(served, self._state, self._run.settings):
                    known += 0 if capacity is None else count * min(window, capacity)
                    unknown += count if capacity is None else 0
            self._ready = (key, known, unknown)
        return fair_share(self._run.settings, member, self._ready[1], self._ready[2])

    def _issue(self, member: Worker, request: int) -> Assignment | None:
        state = self._state
        if not state.pending:
            if not self._may_begin():
                return None
            settings = self._run.settings
            group_id, prompt_index, attempt = state.next_group_id, state.next_prompt(settings.curriculum), 0
            if settings.by_sample:
                self._run.record(ev.Begun(group_id, settings.group_size, prompt_index))
        returned = next(iter(state.pending.values()), None)
        if returned is not None:
            group_id, prompt_index, attempt = returned.group_id, returned.prompt_index, returned.attempt + 1
        name, incarnation = member.name, member.incarnation
        self._run.record(
            ev.Issued(group_id, prompt_index, attempt, name, incarnation, state.version, member.served, request)
        )
        member.held.add(group_id)
        return self._assignment(state.held[group_id])

    def _may_begin(self) -> bool:
        """Whether the admission gate allows one more group."""
        state, settings = self._state, self._run.settings
        orders, depth = settings.orders_per_group, settings.pipeline_depth
        untrained, places = state.untrained_in_window(depth), state.in_flight
        alike = state.ledger.all_of(settings.group_size if settings.by_sample else 0)
        if alike and (not settings.by_sample or not may_admit(settings, untrained=untrained, in_flight=places)):
            return may_admit(settings, untrained=untrained, in_flight=places)
        # Count groups, since a group that lost members still counts as one. Otherwise, if a resume changed the kind of
        # admission or the group size, entries from before could fill the window with less than a batch.
        in_flight = [*state.held.values(), *state.pending.values()]
        places = sum(1 if entry.siblings else orders for entry in in_flight)
        if not settings.by_sample:
            places = len({entry.whose for entry in in_flight})
        return may_admit(settings, untrained=state.groups_in_window(depth) * orders, in_flight=places)

    def _answered(self, member: Worker, request: int) -> tuple[Assignment, ...]:
        """Return the assignments that this request got before."""
        if request < 0:
            return ()
        held = (self._state.held.get(group_id) for group_id in sorted(member.held))
        return tuple(self._assignment(entry) for entry in held if entry is not None and entry.request == request)

    def _assignment(self, entry: Entry) -> Assignment:
        return Assignment(
            group_id=entry.group_id,
            prompt_index=entry.prompt_index,
            attempt=entry.attempt,
            seed=assignment_seed(self._run.seed, entry.group_id, entry.attempt),
            policy_version=entry.issued_version,
            single=entry.siblings > 0,
        )

    def _refuse(self, entry: Entry, header: GroupHeader) -> str:
        if header.prompt_index != entry.prompt_index:
            return f"group {entry.group_id} is of prompt {entry.prompt_index}, not {header.prompt_index}"
        settings = self._run.settings
        fewest, most = (1, 1) if entry.siblings else (settings.fewest_members, settings.group_size)
        if not fewest <= header.members <= most:
            wanted = f"{fewest} to {most}" if fewest < most else f"{most}"
            return f"a group has {wanted} members, not {header.members}"
        if not any(trajectory.version_tokens for trajectory in header.trajectories):
            return "no trajectory has a token to train on"
        for version in header.versions:
            if version not in self._state.tree:
                return f"a token has policy_version {version}, which was never published"
        return ""
