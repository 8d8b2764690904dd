"""Drive a ReplayCore through one random schedule and judge it with an oracle that shares no code with it.

A schedule has 1-3 workers and a learner with random settings. Workers load versions late, die with and without a
successor, fail, and send groups twice and after they were replaced. The learner prefetches, crashes and goes back to a
checkpoint, sometimes with other settings; sometimes the server loses its memory. Sets are evaluated alongside. A
learner that restarts with the same settings must get the same batches again. What has to happen once nothing fails any
more is in `tests.replay.liveness`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from asyncrl.errors import FencedError
from asyncrl.evaluation.orders import EvalAssignment, EvalResult
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.types import NO_VERSION, Assignment, DropReason, GroupHeader, StalePolicy, StepPlan, TrajectoryHeader
from tests.replay.drawn_settings import changed_settings, drawn_settings
from tests.replay.oracle import Oracle

FAILURES = (
    DropReason.FAILED_GENERATION,
    DropReason.FAILED_REWARD,
    DropReason.FAILED_ENVIRONMENT,
    DropReason.FAILED_FILTER,
    DropReason.OVER_LENGTH,
    DropReason.FILTERED_ZERO_VARIANCE,
    DropReason.FILTERED,
    DropReason.INCOMPLETE,
    DropReason.SHUTDOWN,
)


ROWS = (5, 3)


class SimWorker:
    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.served = NO_VERSION
        self.tasks: list[tuple[Assignment, list[int]]] = []
        """Assignments, each with the versions that its tokens will carry."""
        self.evaluation: tuple[EvalAssignment, int] | None = None
        """The evaluation assignment in progress and the version it began with."""


class Simulation:
    def __init__(
        self,
        seed: int,
        policy: StalePolicy | None = None,
        rollbacks: bool = True,
        window: bool | None = None,
        by_sample: bool | None = None,
    ) -> None:
        self.random = rng = Random(seed)
        self.lots = Random(f"{seed} by sample")
        """A generator of its own: drawing from `rng` would change the schedules of the seeds from before admission by
        sample."""
        self.by_sample = by_sample
        self.settings = drawn_settings(rng, self.lots, policy, window=window, by_sample=by_sample)
        self.rollbacks = rollbacks
        self.now = 0.0
        self.stragglers = rng.choice((0.0, 0.5, 0.95))
        self.oracle = Oracle(self.settings)
        self.events: list[ev.Event] = []
        self.incarnations = 0
        self.max_bytes = rng.choice((3, 6, 1000, 1000))
        self.journalled = rng.random() < 0.5
        """True if evicted payloads can be read back."""
        self.plans: dict[int, StepPlan] = {}
        """Step -> its plan as first seen, in the current line of the history."""
        self.learner_settings = 0
        self.core = self._new_core()
        self.zombies: list[tuple[SimWorker, GroupHeader]] = []
        self.checkpoint: tuple[int, int, dict] | None = None
        self.workers = [self._new_worker(f"w{n}") for n in range(rng.choice((1, 2, 2, 3)))]
        self._start_learner()

    # ---- parts

    def _new_core(self) -> ReplayCore:
        self.events.clear()
        self.began = self.settings
        """The settings at the first event."""
        core = ReplayCore(self.settings, lambda: self.now, max_bytes=self.max_bytes, journal=self._journal)
        core.space.stored = (lambda entry: b"payload") if self.journalled else None
        return core

    def _journal(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.Evicted):
            del self.plans[event.step]
        self.oracle.watch(event)

    def _new_worker(self, name: str) -> SimWorker:
        self.incarnations += 1
        worker = SimWorker(name, f"i{self.incarnations}")
        self.core.hello(worker.name, worker.incarnation)
        return worker

    def _start_learner(self, branch: bool = False) -> None:
        """Start a new learner process, from the last checkpoint if there is one."""
        self.incarnations += 1
        step, version, snapshot = self.checkpoint or (None, NO_VERSION, None)
        restored = self.core.restore(
            step=step,
            policy_version=version,
            snapshot=snapshot,
            incarnation=f"l{self.incarnations}",
            settings=str(self.learner_settings),
            branch=branch,
        )
        self.next_step, self.version = restored.next_step, restored.next_version
        self.core.publish(policy_version=self.version, parent=version)
        self.held: StepPlan | None = None
        self.asked: list[dict[str, object]] = []
        """Evaluations already asked for, so that none is asked for twice."""

    def _lease(self, step: int) -> StepPlan | None:
        plan = self.core.lease(step)
        if plan is not None:
            assert self.plans.setdefault(step, plan) == plan, f"step {step} was {self.plans[step]}, now it is {plan}"
        return plan

    # ---- what may happen

    def run(self, actions: int) -> None:
        rng = self.random
        # Each schedule draws its own weights: this reaches states that one fixed mixture never visits.
        weights = {
            self.load: rng.choice((1, 2, 5)),
            self.acquire: rng.choice((3, 6)),
            self.insert: rng.choice((4, 7, 12)),
            self.learn: rng.choice((4, 8, 16)),
            self.prefetch: rng.choice((0, 3, 8)),
            self.fail: rng.choice((0, 1)),
            self.die: rng.choice((0, 0, 1)),
            self.doze: rng.choice((0, 0, 1)),
            self.zombie: 1,
            self.commit: rng.choice((0, 1, 2)),
            self.wait: rng.choice((0, 1)),
            self.crash: rng.choice((0, 0, 1)),
            self.evaluate: rng.choice((0, 1, 3)),
            self.score: rng.choice((1, 4)),
        }
        choices = [action for action, weight in weights.items() for _ in range(weight)]
        for _ in range(actions):
            rng.choice(choices)()
            self.oracle.check(self.core)

    def _worker(self) -> SimWorker:
        return self.random.choice(self.workers)

    def _alive(self, worker: SimWorker) -> None:
        try:
            self.core.heartbeat(worker.name, worker.incarnation, {"generated_tokens": 1.0})
        except UnknownPeer:
            self.core.hello(worker.name, worker.incarnation, worker.served)

    def load(self) -> None:
        self._load(self._worker())

    def _load(self, worker: SimWorker) -> None:
        self._alive(worker)
        if worker.served != self.version:
            worker.served = self.version
            for _, versions in worker.tasks:
                versions.append(self.version)
        self.core.served(worker.name, worker.incarnation, self.version, "f")

    def acquire(self) -> None:
        worker = self._worker()
        if self.random.random() < 0.6:
            self._load(worker)
        self._alive(worker)
        self._acquire(worker, self.random.randint(1, 8))

    def _acquire(self, worker: SimWorker, slots: int) -> None:
        self.core.survey(worker.name, worker.incarnation, ROWS)
        acquired = self.core.acquire(worker.name, worker.incarnation, slots)
        worker.tasks += [(assignment, [worker.served]) for assignment in acquired.assignments]
        for order in acquired.evaluations:
            self.oracle.handed_out(order)
            worker.evaluation = order, worker.served

    def _header(self, worker: SimWorker, assignment: Assignment, versions: list[int]) -> GroupHeader:
        trajectories = []
        settings = self.settings
        fewest, most = (1, 1) if assignment.single else (settings.fewest_members, settings.group_size)
        for _ in range(self.random.randint(fewest, most)):
            # A member may have ended before the last update.
            kept = versions[: self.random.randint(1, len(versions))]
            runs = tuple((version, self.random.randint(1, 3)) for version in kept)
            length = 2 + sum(count for _, count in runs)
            first = TrajectoryHeader(length=length, prompt_length=2, reward=self.random.random(), version_tokens=runs)
            branches = self.random.choice((0, 0, 0, 2))
            trajectories += [first, *[replace(first, branch=True)] * branches]
        return GroupHeader(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=worker.name,
            trajectories=tuple(trajectories),
            nbytes=1,
        )

    def insert(self) -> None:
        worker = self._worker()
        if not worker.tasks:
            return
        self._alive(worker)
        # Often insert the latest group first: the early ones become stragglers, which the gates are there for.
        straggle = self.random.random() < self.stragglers
        assignment, versions = worker.tasks.pop(-1 if straggle else self.random.randrange(len(worker.tasks)))
        header = self._header(worker, assignment, versions)
        first = self.core.insert(worker.name, worker.incarnation, header, b"payload")
        assert first.status in ("accepted", "fenced", "closed")
        if self.random.random() < 0.1:
            again = self.core.insert(worker.name, worker.incarnation, header, b"payload")
            assert again.status in ("duplicate", "fenced", "closed")

    def fail(self) -> None:
        worker = self._worker()
        if worker.tasks:
            self._alive(worker)
            assignment, _ = worker.tasks.pop()
            reason = self.random.choice(FAILURES)
            self.oracle.reported = None if reason is DropReason.SHUTDOWN else reason
            filtered = reason in (DropReason.FILTERED, DropReason.FILTERED_ZERO_VARIANCE)
            rewards = [self.random.choice((0.0, 1.0))] * self.settings.group_size if filtered else []
            whose = (worker.name, worker.incarnation, assignment.group_id, assignment.attempt)
            for _ in range(self.random.choice((1, 1, 2))):
                self.core.fail(*whose, reason, "", rewards)
            self.oracle.reported = None

    def die(self) -> None:
        """Replace a worker at once, or after its heartbeats time out. The groups it had in progress may still come
        later, from a zombie."""
        place = self.random.randrange(len(self.workers))
        worker = self.workers[place]
        self.zombies += [(worker, self._header(worker, a, versions)) for a, versions in worker.tasks]
        if self.random.random() < 0.5:
            self.now += 11.0
            for other in self.workers:
                if other is not worker:
                    self._alive(other)
            self.core.expire()
        self.workers[place] = self._new_worker(worker.name)

    def doze(self) -> None:
        """Keep a worker silent beyond its timeout. It then goes on with its groups, which others may hold by now."""
        sleeper = self._worker()
        self.now += 11.0
        for other in self.workers:
            if other is not sleeper:
                self._alive(other)
        self.core.expire()

    def zombie(self) -> None:
        if not self.zombies:
            return
        worker, header = self.zombies.pop()
        try:
            reply = self.core.insert(worker.name, worker.incarnation, header, b"payload")
        except (FencedError, UnknownPeer):
            return
        assert reply.status in ("fenced", "duplicate", "closed")

    def learn(self) -> None:
        """Train the leased batch, or lease one if there is none."""
        if self.held is None:
            self.held = self._lease(self.next_step)
            return
        again = self.core.lease(self.next_step)
        assert again is self.held
        self.oracle.train(self.held, self.version)
        version = self.core.state.tree.newest + 1
        reply = self.core.trained(step=self.next_step, policy_version=version)
        assert self.core.trained(step=self.next_step, policy_version=version) is reply
        self.oracle.evaluated(reply.evaluations)
        self.version, self.held = version, None
        self.next_step += 1

    def evaluate(self) -> None:
        """Ask for an evaluation of the newest weights, which perhaps no worker serves yet."""
        rng, rows = self.random, self.random.randint(1, 5)
        asked = {"step": self.next_step, "policy_version": self.version, "eval_set": rng.choice(("a", "b"))}
        if asked in self.asked:
            return
        self.asked.append(asked)
        job = self.core.evaluate(**asked, rows=rows, chunk=rng.randint(1, 3))
        self.oracle.asked_to_evaluate(job, asked["eval_set"], rows, self.version)

    def score(self) -> None:
        self._score(self._worker())

    def _score(self, worker: SimWorker) -> None:
        """Report an evaluation result, perhaps twice, perhaps long after its rows were given to another worker."""
        if worker.evaluation is None:
            return
        self._alive(worker)
        (order, began), worker.evaluation = worker.evaluation, None
        failed = self.random.randint(0, order.stop - order.start)
        scored = order.stop - order.start - failed
        versions = (began, max(began, worker.served)) if scored else (NO_VERSION, NO_VERSION)
        result = EvalResult(
            job_id=order.job_id,
            chunk=order.chunk,
            attempt=order.attempt,
            version_min=versions[0],
            version_max=versions[1],
            scores=(0.5,) * scored,
            failed=failed,
        )
        for _ in range(self.random.choice((1, 1, 2))):
            self.core.report_evaluation(worker.name, worker.incarnation, result)

    def prefetch(self) -> None:
        if self.held is not None:
            self._lease(self.next_step + 1)

    def commit(self) -> None:
        if self.next_step > 0 and self.held is None:
            self.checkpoint = (self.next_step - 1, self.version, self.core.snapshot())
            if self.random.random() < 0.7:  # Otherwise the learner dies before it can commit.
                self.core.commit(self.next_step - 1)

    def wait(self) -> None:
        self.now += self.random.choice((0.5, 3.0))
        self.core.expire()

    def crash(self) -> None:
        """Send the learner back to its checkpoint; sometimes by hand, sometimes with other settings, and sometimes the
        server has lost its memory too."""
        if not self.rollbacks or self.random.random() < 0.5:
            return
        self.oracle.rolled_back = True
        step, _, snapshot = self.checkpoint or (-1, 0, None)
        other, by_hand = self.random.random() < 0.3, self.random.random() < 0.2
        if snapshot is not None and self.random.random() < 0.2:
            self.core = self._new_core()
            # The server refuses incarnations that worked for its predecessor (see sessions.py).
            self.workers = [self._new_worker(worker.name) for worker in self.workers]
            self.oracle.begin(self.settings, {group_id: failures for group_id, _, _, failures in snapshot["open"]})
            self.zombies.clear()
            self.plans.clear()
        if other:
            self._change_settings()
        if other or by_hand:
            self.plans = {number: plan for number, plan in self.plans.items() if number <= step}
        self.oracle.passed.clear()
        self.oracle.evaluations.clear()
        self.oracle.begun.clear()  # jobs are counted from 0 again
        self._start_learner(by_hand)

    def _change_settings(self) -> None:
        """Change the batch size and the staleness bound, as a resumed run may."""
        self.learner_settings += 1
        self.settings = changed_settings(self.random, self.lots, self.settings, self.by_sample)
        self.oracle.settings = self.core.run.settings = self.settings
        self.core.configure(self.settings.plain())
