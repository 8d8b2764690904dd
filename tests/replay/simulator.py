"""Drives a ReplayCore through one random schedule and judges it with an oracle that shares no code with it.

A schedule: 1-3 workers and a learner with random settings; workers load versions late, die with and without a
successor, fail, send groups twice and after they were replaced; the learner prefetches, crashes, goes back to a
checkpoint, and now and then the server loses its memory. Then everything is well for a while, and steps must be
trained again.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from asyncrl.errors import FencedError
from asyncrl.replay import events as ev
from asyncrl.replay.admission import AdmissionSettings
from asyncrl.replay.core import ReplayCore
from asyncrl.replay.order import SELECTORS
from asyncrl.replay.rollout_side import UnknownPeer
from asyncrl.types import NO_VERSION, Assignment, DropReason, GroupHeader, StalePolicy, StepPlan, TrajectoryHeader

FAILURES = (
    DropReason.FAILED_GENERATION,
    DropReason.FAILED_REWARD,
    DropReason.FAILED_FILTER,
    DropReason.OVER_LENGTH,
    DropReason.FILTERED_ZERO_VARIANCE,
    DropReason.FILTERED,
    DropReason.INCOMPLETE,
    DropReason.SHUTDOWN,
)


FINAL = (
    DropReason.OVER_LENGTH,
    DropReason.FILTERED_ZERO_VARIANCE,
    DropReason.FILTERED,
    DropReason.INCOMPLETE,
)
"""Reported by a worker they end a group, whatever its tries so far."""


class Oracle:
    """What must hold, kept by other means: naive ancestor walks and a tally of the events."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.parents: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.steps_of: dict[int, list[int]] = {}
        """Steps that a group was trained in."""
        self.rolled_back = False
        self.reported: DropReason | None = None
        """What a worker is just reporting."""
        self.begin({}, {}, 0, 0)

    def begin(self, states: dict[int, str], tries: dict[int, int], trained: int, dropped: int) -> None:
        self.states, self.tries = states, tries
        self.admitted = len(states) + trained + dropped
        self.members: dict[int, int] = {}
        """Of inserted groups that are open."""
        self.tally = {"in_flight": len(states), "inserted": 0, "leased": 0, "trained": trained, "dropped": dropped}

    def ancestors(self, version: int) -> dict[int, int]:
        """Every ancestor with the trained steps up to it."""
        result, length = {}, 0
        while version != NO_VERSION:
            result[version] = length
            length += self.lengths[version]
            version = self.parents[version]
        return result

    def distance(self, a: int, b: int) -> int:
        from_a = self.ancestors(a)
        length = 0
        while b not in from_a:
            length += self.lengths[b]
            b = self.parents[b]
        return length + from_a[b]

    def move(self, group_id: int, state: str) -> None:
        before = self.states.get(group_id)
        if before is not None:
            self.tally[before] -= 1
        self.tally[state] += 1
        self.states[group_id] = state
        if state == "dropped":
            assert not self.steps_of.get(group_id), "a trained group was dropped"
            del self.states[group_id]

    def returned(self, event: ev.Returned | ev.Dropped) -> None:
        """What a worker reports ends the group at once, or lets it be tried again `max_attempts` times at most."""
        tries = self.tries.get(event.group_id, 0)
        if isinstance(event, ev.Returned):
            self.tries[event.group_id] = tries + event.counted
            assert self.tries[event.group_id] < self.settings.max_attempts, "a group is tried too often"
            assert self.reported not in FINAL, f"a group is tried again after {self.reported}"
        elif self.reported is not None:
            assert event.reason is self.reported, f"{self.reported} was reported, dropped is {event.reason}"
            assert self.reported in FINAL or tries + 1 == self.settings.max_attempts, "dropped before the last try"

    def watch(self, event: ev.Event) -> None:
        """Called with each event before it is applied."""
        if isinstance(event, ev.Issued) and event.group_id not in self.states:
            self.admitted += 1
            self.move(event.group_id, "in_flight")
        elif isinstance(event, ev.Inserted):
            members = self.members[event.header.group_id] = len(event.header.trajectories)
            assert (self.settings.min_group_size or self.settings.group_size) <= members <= self.settings.group_size
            self.move(event.header.group_id, "inserted")
        elif isinstance(event, ev.Returned):
            self.returned(event)
        elif isinstance(event, ev.Dropped):
            self.returned(event)
            if event.reason is DropReason.STALE and self.settings.stale_policy is StalePolicy.WAIT:
                assert self.rolled_back, "policy wait dropped a group"
            self.move(event.group_id, "dropped")
        elif isinstance(event, ev.Sealed):
            assert len(set(event.members)) == len(event.members) == self.settings.groups_per_step
            for group_id in event.members:
                self.move(group_id, "leased")
        elif isinstance(event, ev.Reused):
            for group_id in event.groups:
                assert self.states[group_id] == "trained"
                self.move(group_id, "inserted")
        elif isinstance(event, ev.Retired):
            assert self.steps_of[event.group_id], "a group was retired that was never trained"
            self.move(event.group_id, "trained")

    def train(self, plan: StepPlan, version: int) -> None:
        """Judge a step trained by a learner that holds `version`."""
        settings = self.settings
        assert len(plan.groups) == settings.groups_per_step
        fresh_total = 0
        for group in plan.groups:
            assert len(group.trajectories) == self.members[group.group_id], "a group lost or gained members"
            steps = self.steps_of.setdefault(group.group_id, [])
            assert plan.step not in steps, f"group {group.group_id} is in step {plan.step} twice"
            steps.append(plan.step)
            assert len(steps) <= settings.max_times_sampled, f"group {group.group_id} trained in steps {steps}"
            fresh_of_group = 0
            for trajectory in group.trajectories:
                for token_version, count in trajectory.version_tokens:
                    contributes = plan.staleness[token_version] <= plan.max_staleness
                    age = self.distance(token_version, version)
                    assert age == plan.staleness[token_version]
                    if contributes:
                        assert age <= settings.max_staleness, f"a token of staleness {age} was trained"
                        fresh_of_group += count
                    elif settings.stale_policy is not StalePolicy.MASK:
                        assert self.rolled_back, f"policy {settings.stale_policy} masked a token"
            assert fresh_of_group > 0
            fresh_total += fresh_of_group
        assert fresh_total > 0

    def trained(self, event: ev.Trained, core: ReplayCore) -> None:
        """A group that a restore has planned for a later step too stays leased."""
        for entry in core.state.buffer.untrained[event.step].members:
            if not any(step != event.step for step in entry.planned):
                self.move(entry.group_id, "trained")

    def restore(self, step: int) -> None:
        self.steps_of = {group: [n for n in steps if n <= step] for group, steps in self.steps_of.items()}

    def check(self, core: ReplayCore) -> None:
        """The conservation law, by the oracle's own tally."""
        ledger, tally = core.state.ledger, self.tally
        counted = {state.value: count for state, count in ledger.counts.items()}
        counted["dropped"] = sum(ledger.dropped.values())
        assert counted == tally, f"{counted} != {tally}"
        assert ledger.admitted == self.admitted == sum(tally.values())


class SimWorker:
    def __init__(self, name: str, incarnation: str) -> None:
        self.name, self.incarnation = name, incarnation
        self.served = NO_VERSION
        self.tasks: list[tuple[Assignment, list[int]]] = []
        """Assignment and the versions its tokens will carry."""


class Simulation:
    def __init__(self, seed: int, policy: StalePolicy | None = None, rollbacks: bool = True) -> None:
        self.random = rng = Random(seed)
        max_staleness = rng.choice((0, 1, 2, 3))
        group_size = rng.choice((1, 1, 2, 3))
        self.settings = AdmissionSettings(
            groups_per_step=rng.choice((1, 2, 3)),
            group_size=group_size,
            min_group_size=rng.choice((0, rng.randint(1, group_size))),
            max_staleness=max_staleness,
            pipeline_depth=rng.choice((max_staleness, rng.randint(0, max_staleness))),
            max_in_flight=rng.choice((1, 3, 16, 16)),
            stale_policy=policy or rng.choice(tuple(StalePolicy)),
            readmit_dropped=rng.random() < 0.5,
            max_attempts=rng.choice((1, 2, 3)),
            group_timeout_s=rng.choice((0.0, 0.0, 9.0)),
        )
        if self.settings.stale_policy is not StalePolicy.WAIT:
            order, uses = rng.choice(("fifo", *SELECTORS)), rng.choice((1, 1, 2, 3))
            self.settings = replace(self.settings, order=order, max_times_sampled=uses)
        self.rollbacks = rollbacks
        self.now = 0.0
        self.stragglers = rng.choice((0.0, 0.5, 0.95))
        self.oracle = Oracle(self.settings)
        self.events: list[ev.Event] = []
        self.incarnations = 0
        self.max_bytes = rng.choice((3, 6, 1000, 1000))
        self.core = self._new_core()
        self.zombies: list[tuple[SimWorker, GroupHeader]] = []
        self.checkpoint: tuple[int, int, dict] | None = None
        self.workers = [self._new_worker(f"w{n}") for n in range(rng.choice((1, 2, 2, 3)))]
        self._start_learner()

    # ---- parts

    def _new_core(self) -> ReplayCore:
        self.events.clear()
        return ReplayCore(self.settings, lambda: self.now, max_bytes=self.max_bytes, journal=self._journal)

    def _journal(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.Trained):
            self.oracle.trained(event, self.core)
        self.oracle.watch(event)

    def _new_worker(self, name: str) -> SimWorker:
        self.incarnations += 1
        worker = SimWorker(name, f"i{self.incarnations}")
        self.core.hello(worker.name, worker.incarnation)
        return worker

    def _publish(self, version: int, parent: int, length: int) -> None:
        self.oracle.parents[version], self.oracle.lengths[version] = parent, length

    def _start_learner(self) -> None:
        """A new learner process, from the last checkpoint if there is one."""
        self.incarnations += 1
        step, version, snapshot = self.checkpoint or (None, NO_VERSION, None)
        restored = self.core.restore(
            step=step, policy_version=version, snapshot=snapshot, incarnation=f"l{self.incarnations}"
        )
        self.next_step, self.version = restored.next_step, restored.next_version
        root = min(self.oracle.parents, default=None)
        parent = version if version != NO_VERSION or root is None else root
        self._publish(self.version, parent, 0)
        self.core.publish(policy_version=self.version, parent=version)
        self.held: StepPlan | None = None

    # ---- what may happen

    def run(self, actions: int) -> None:
        rng = self.random
        # Weights of their own per schedule reach corners that one fixed mixture never visits.
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
        for assignment in self.core.acquire(worker.name, worker.incarnation, self.random.randint(1, 8)).assignments:
            worker.tasks.append((assignment, [worker.served]))

    def _header(self, worker: SimWorker, assignment: Assignment, versions: list[int]) -> GroupHeader:
        trajectories = []
        for _ in range(self.random.randint(self.settings.fewest_members, self.settings.group_size)):
            # A sibling may have ended before the last update.
            kept = versions[: self.random.randint(1, len(versions))]
            runs = tuple((version, self.random.randint(1, 3)) for version in kept)
            length = 2 + sum(count for _, count in runs)
            trajectories.append(
                TrajectoryHeader(length=length, prompt_length=2, reward=self.random.random(), version_tokens=runs)
            )
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
        # Late ones first, often: the early ones become stragglers, which is what the gates are for.
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
            for _ in range(self.random.choice((1, 1, 2))):
                self.core.fail(worker.name, worker.incarnation, assignment.group_id, assignment.attempt, reason)
            self.oracle.reported = None

    def die(self) -> None:
        """Replaced at once, or silent until the server gives up; what it finishes later is a zombie's."""
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
        """Silent for too long, then back as if nothing had happened, with groups that others may be making by now."""
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
        """Train the batch in hand, or ask for it."""
        if self.held is None:
            self.held = self.core.lease(self.next_step)
            return
        again = self.core.lease(self.next_step)
        assert again is self.held
        self.oracle.train(self.held, self.version)
        version = self.core.state.tree.newest + 1
        self._publish(version, self.version, 1)
        reply = self.core.trained(step=self.next_step, policy_version=version)
        assert self.core.trained(step=self.next_step, policy_version=version) is reply
        self.version, self.held = version, None
        self.next_step += 1

    def prefetch(self) -> None:
        if self.held is not None:
            self.core.lease(self.next_step + 1)

    def commit(self) -> None:
        if self.next_step > 0 and self.held is None:
            self.checkpoint = (self.next_step - 1, self.version, self.core.snapshot())
            if self.random.random() < 0.7:  # Otherwise the learner dies before it can say so.
                self.core.commit(self.next_step - 1)

    def wait(self) -> None:
        self.now += self.random.choice((0.5, 3.0))
        self.core.expire()

    def crash(self) -> None:
        """The learner goes back to its checkpoint; sometimes the server has lost its memory too."""
        if not self.rollbacks or self.random.random() < 0.5:
            return
        self.oracle.rolled_back = True
        step, _, snapshot = self.checkpoint or (-1, 0, None)
        if snapshot is not None and self.random.random() < 0.2:
            self.core = self._new_core()
            # The server refuses incarnations that worked for its predecessor (see sessions.py).
            self.workers = [self._new_worker(worker.name) for worker in self.workers]
            open_groups = dict.fromkeys((row[0] for row in snapshot["open"]), "in_flight")
            tries = {group_id: failures for group_id, _, _, failures in snapshot["open"]}
            self.oracle.begin(open_groups, tries, snapshot["trained"], sum(snapshot["dropped"].values()))
            self.oracle.parents = {v: p for v, p in self.oracle.parents.items() if v <= self.checkpoint[1]}
            self.zombies.clear()
        else:
            self._undo(step)
        self.oracle.restore(step)
        self._start_learner()

    def _undo(self, step: int) -> None:
        """Where the groups trained after `step` belong: planned again, or made again where no payload is left."""
        steps = self.core.state.buffer.trained
        undone = {entry for number, sealed in steps.items() if number > step for entry in sealed.members}
        for entry in sorted(undone, key=lambda entry: entry.group_id):
            before = [number for number in self.oracle.steps_of[entry.group_id] if number <= step]
            again = [number for number in entry.kept if number > step and not steps[number].evicted]
            if again or entry.planned:
                state = "leased"
            elif before:
                state = "trained"
            else:
                state = "in_flight" if entry.payload is None else "inserted"
            self.oracle.move(entry.group_id, state)

    # ---- liveness

    def must_progress(self, steps: int = 2, rounds: int = 40) -> None:
        """With everybody alive and willing, `steps` more steps are trained within `rounds`."""
        goal = self.next_step + steps
        for _ in range(rounds * steps):
            for worker in self.workers:
                self._load(worker)
                for assignment in self.core.acquire(worker.name, worker.incarnation, 2).assignments:
                    worker.tasks.append((assignment, [worker.served]))
                while worker.tasks:
                    assignment, versions = worker.tasks.pop(0)
                    following = self.core.state.buffer.untrained.get(self.core.state.trained_steps)
                    assert self.core.credit() > 0 or (following is not None and following.plan is not None)
                    header = self._header(worker, assignment, versions)
                    self.core.insert(worker.name, worker.incarnation, header, b"payload")
            self.learn()
            self.learn()
            self.oracle.check(self.core)
            if self.next_step >= goal:
                return
        raise AssertionError(f"nobody moves: {self.settings}: {self.core.explain(self.next_step)}")


def run_schedule(seed: int, actions: int = 60, **options) -> Simulation:
    simulation = Simulation(seed, **options)
    try:
        simulation.run(actions)
        simulation.must_progress()
    except BaseException as error:
        error.add_note(f"schedule seed={seed} options={options} settings={simulation.settings}")
        raise
    return simulation
