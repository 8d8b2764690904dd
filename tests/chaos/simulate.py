"""Simulate the pure core under faults, in virtual time, compared with the auditor after every event (`model.py`).

    python -m tests.chaos.simulate --seeds 100000 [--first 0]

Clients talk to the core over a network that loses, repeats and reorders messages. The journal is a list whose un-synced
end a power loss destroys. A reply is sent only when the events it depends on are synced. Workers die, come back as
zombies and are replaced. The learner dies and returns to its checkpoint, where it gets exactly the batches that it had,
unless it was sent there by hand or comes with other settings.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import replace
from random import Random
from typing import Any

from asyncrl.errors import FencedError
from asyncrl.replay.audit.report import Audit, audit
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.core.durable import events as ev
from asyncrl.replay.core.requests.rollouts import UnknownPeer
from asyncrl.types import NO_VERSION, Assignment, DropReason, GroupHeader, StalePolicy, TrajectoryHeader

from .virtual import HEARTBEAT_TIMEOUT_S, Client, Request, VirtualServer


class World(VirtualServer):
    """The simulated clients and faults."""

    syncs = (3, 10, 30)
    power_losses = (0, 1, 2)
    """Weights of a power loss among all actions. Each seed draws one value, here as for the values around it."""
    cuts = (0.0, 0.1, 0.5)
    """Probability of a power loss just when a plan has arrived: what the plan depends on has to be durable by then."""
    calms = (0, 1, 3)
    """Steps trained before the first fault. Without them most faults hit a run that has no plan yet."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        bound = rng.choice((0, 1, 2, 3))
        settings = AdmissionSettings(
            groups_per_step=rng.choice((1, 2, 3)),
            group_size=rng.choice((1, 2)),
            max_staleness=bound,
            pipeline_depth=rng.randint(0, bound),
            max_in_flight=rng.choice((2, 16)),
            stale_policy=rng.choice(tuple(StalePolicy)),
            max_attempts=rng.choice((1, 2, 3)),
        )
        self.lots = Random(f"{seed} by sample")
        """A generator of its own: drawing from `rng` would change the schedules of the seeds from before admission by
        sample."""
        settings = replace(settings, by_sample=self.lots.random() < 0.3)
        super().__init__(settings, rng.choice((4, 1000)), rng)
        self.cut = 0.0
        self.acked: set[int] = set()
        """Groups whose insertion was acknowledged."""
        self.history: dict[int, tuple[int, ...]] = {}
        """Step -> groups, as the learner knows them, of its surviving history."""
        self.planned: dict[int, Any] = {}
        """Step -> groups and staleness that the learner was given, in the current line of its history."""
        self.learner_settings = 0
        self.began = settings
        self.checkpoint: tuple[int, int] | None = None
        self.published = NO_VERSION
        """Newest version that left the learner, which happens once the replay has acknowledged its number."""
        self.incarnations = 0
        self.workers = [self._client(f"w{n}") for n in range(rng.choice((1, 2, 3)))]
        self.learner = self._client("learner")

    # ---- the clients

    def _client(self, name: str) -> Client:
        self.incarnations += 1
        client = Client(name=name, incarnation=f"i{self.incarnations}")
        return client

    def _hello(self, client: Client) -> None:
        """Send `hello`, unless one is open. Nothing else is sent before its answer arrives."""
        client.welcome = False
        if not any(request.verb == "hello" for request in client.open.values()):
            self._ask(client, "hello")

    def _ask(self, client: Client, verb: str, *arguments: Any) -> None:
        client.numbers += 1
        request = client.open[client.numbers] = Request(client, client.numbers, verb, arguments)
        self.network.append(request)

    def resend(self) -> None:
        client = self.random.choice([*self.workers, self.learner])
        if client.open and client.welcome:  # Before the answer to its hello a client sends nothing else.
            self._note("resent request")
            self.network.append(self.random.choice(list(client.open.values())))

    def answer(self) -> None:
        """Deliver one answer to its client, or lose it."""
        self.release()
        if not self.answers:
            return
        boot, request, answer = self.answers.pop(self.random.randrange(len(self.answers)))
        client = request.client
        if boot < client.boot:
            return  # An answer of an earlier server is read before those of its successor, or never.
        if self.random.random() < 0.05 or request.number not in client.open:
            return
        if not client.alive:
            return
        if isinstance(answer, UnknownPeer):
            self._hello(client)
            return  # the request stays open and is sent again
        del client.open[request.number]
        if isinstance(answer, Exception):
            self._refused(request, answer)
        else:
            getattr(self, f"_on_{request.verb}", lambda *_: None)(client, answer, request)
            if request.verb == "lease" and answer is not None and self.random.random() < self.cut:
                self.power_loss()

    def _refused(self, request: Request, error: Exception) -> None:
        """Raise AssertionError if a request of the current learner was refused that no later request overtook."""
        if request.client is self.learner and request.verb in ("restore", "trained", "publish"):
            raise AssertionError(f"{request.verb}{request.arguments} was refused: {error}") from error

    def step_worker(self) -> None:
        worker = self.random.choice(self.workers)
        choice = self.random.random()
        if not worker.welcome:
            self._hello(worker)
            return
        if worker.served != self.published and choice < 0.4:
            worker.served = self.published
            for _, versions in worker.tasks:
                versions.append(worker.served)
            self._ask(worker, "served", worker.served)
        elif worker.tasks and choice < 0.75:
            assignment, versions = worker.tasks.pop(self.random.randrange(len(worker.tasks)))
            if self.random.random() < 0.1:
                self._ask(worker, "fail", assignment.group_id, assignment.attempt, DropReason.FAILED_REWARD)
            else:
                self._ask(worker, "insert", self._header(worker, assignment, versions), b"payload")
        elif not any(request.verb == "acquire" for request in worker.open.values()):
            self._ask(worker, "acquire", self.random.randint(1, 4))

    def _header(self, worker: Client, assignment: Assignment, versions: list[int]) -> GroupHeader:
        runs = tuple((version, 1) for version in versions[: self.random.randint(1, len(versions))])
        trajectory = TrajectoryHeader(length=1 + len(runs), prompt_length=1, reward=0.0, version_tokens=runs)
        return GroupHeader(
            group_id=assignment.group_id,
            prompt_index=assignment.prompt_index,
            attempt=assignment.attempt,
            worker=worker.name,
            trajectories=(trajectory,) * (1 if assignment.single else self.settings.group_size),
            nbytes=1,
        )

    def _on_hello(self, client: Client, answer: Any, request: Request) -> None:
        if not client.welcome:
            client.boot = self.boots
            self.network += [open_request for open_request in client.open.values() if open_request is not request]
        client.welcome = True

    def _on_acquire(self, worker: Client, acquired: Any, request: Request) -> None:
        worker.tasks += [(assignment, [worker.served]) for assignment in acquired.assignments]

    def _on_insert(self, worker: Client, reply: Any, request: Request) -> None:
        assert reply.status != "rejected", reply.reason
        if reply.status in ("accepted", "duplicate"):
            self.acked.add(request.arguments[0].group_id)

    def step_learner(self) -> None:
        """Send the next request of the loop restore, publish, lease, trained."""
        learner = self.learner
        if not learner.welcome:
            self._hello(learner)
        if learner.open:
            return
        if learner.phase == "restore":
            checkpoint = self.checkpoint or (None, NO_VERSION)
            self._ask(learner, "restore", *checkpoint, str(self.learner_settings), learner.branch)
        elif learner.phase == "publish":
            parent = self.checkpoint[1] if self.checkpoint else NO_VERSION
            self._ask(learner, "publish", learner.version, parent)
        elif learner.phase == "lease":
            self._ask(learner, "lease", learner.next_step)
            if self.random.random() < 0.3:
                self._ask(learner, "lease", learner.next_step + 1)
        elif learner.phase == "trained":
            self._ask(learner, "trained", learner.next_step, learner.version + 1)

    def _on_restore(self, learner: Client, restored: Any, request: Request) -> None:
        learner.next_step, learner.version, learner.phase = restored.next_step, restored.next_version, "publish"
        self.history = {step: groups for step, groups in self.history.items() if step < restored.next_step}
        for event in self.journal:
            if isinstance(event, ev.Evicted):  # Its payloads were evicted: the step is planned again.
                self.planned.pop(event.step, None)

    def _on_publish(self, learner: Client, answer: Any, request: Request) -> None:
        learner.phase, self.published = "lease", learner.version

    def _on_lease(self, learner: Client, plan: Any, request: Request) -> None:
        step = request.arguments[0]
        if plan is None or learner.phase not in ("lease", "trained"):
            return
        known = self.planned.setdefault(step, plan)
        assert known == plan, f"step {step} was {known}, now it is {plan}"
        if step == learner.next_step and learner.phase == "lease":
            learner.plan, learner.phase = plan[0], "trained"

    def _on_trained(self, learner: Client, reply: Any, request: Request) -> None:
        step, version = request.arguments
        if step != learner.next_step:
            return
        self.history[step] = learner.plan
        trained = [group for groups in self.history.values() for group in groups]
        assert len(trained) == len(set(trained)), "a group was trained twice"
        learner.next_step, learner.version, learner.phase = step + 1, version, "lease"
        self.published = version
        if self.random.random() < 0.3:
            self.checkpoint = (step, version)
            if self.random.random() < 0.8:
                self._ask(learner, "commit", step)

    # ---- faults

    def kill_worker(self) -> None:
        """Replace a worker, at once or after its heartbeats time out. Its groups in flight still arrive later."""
        self._note("worker killed")
        place = self.random.randrange(len(self.workers))
        dead = self.workers[place]
        for assignment, versions in dead.tasks:
            self._ask(dead, "insert", self._header(dead, assignment, versions), b"zombie")
        dead.alive = False
        if self.random.random() < 0.5:
            self.pass_time(silent=dead)
        self.workers[place] = self._client(dead.name)

    def pass_time(self, silent: Client | None = None) -> None:
        self.now += HEARTBEAT_TIMEOUT_S + 1
        for worker in self.workers:
            if worker is not silent and worker.alive:
                with contextlib.suppress(UnknownPeer, FencedError):
                    self.core.heartbeat(worker.name, worker.incarnation, {})
        self.core.expire()

    def pause_worker(self) -> None:
        self._note("worker paused")
        self.pass_time(silent=self.random.choice(self.workers))

    def kill_learner(self) -> None:
        self._note("learner killed")
        self.learner.alive = False
        self.learner = self._client("learner")
        committed = self.checkpoint[0] if self.checkpoint else -1
        # `planned` is kept: a step that was planned and not trained has to come back with the same plan.
        self.history = {step: groups for step, groups in self.history.items() if step <= committed}
        self.learner.branch = self.random.random() < 0.15
        other = self.random.random() < 0.2
        if other:
            self._change_settings()
        if other or self.learner.branch:
            self._note("branch")
            self.planned = {step: plan for step, plan in self.planned.items() if step <= committed}

    def _change_settings(self) -> None:
        """Change the settings that may change when a run is resumed."""
        self.learner_settings += 1
        bound = self.random.choice((0, 1, 2, 3))
        self.settings = replace(
            self.settings,
            groups_per_step=self.random.choice((1, 2, 3)),
            max_staleness=bound,
            pipeline_depth=self.random.randint(0, bound),
            by_sample=self.lots.random() < 0.3,
        )
        self.core.run.settings = self.settings
        self.core.configure(self.settings.plain())

    def power_loss(self) -> None:
        super().power_loss()
        for client in (*self.workers, self.learner):
            client.welcome = False
        self.check_acknowledged()

    def check_acknowledged(self) -> None:
        """Check that each acknowledged group is stored, trained, or was dropped with a reason, and that no trained step
        is forgotten."""
        model = self.model
        for group_id in self.acked:
            known = group_id in model.groups or group_id in model.gone
            assert known, f"group {group_id} was acknowledged and is unknown"
        lost = [step for step in self.history if step >= model.trained_steps]
        assert not lost, f"steps {lost} were acknowledged as trained and are forgotten"

    # ---- a run

    def run(self, actions: int) -> None:
        rng = self.random
        calm = rng.choice(self.calms)
        if calm:
            self.go_on(calm)
        self.cut = rng.choice(self.cuts)
        weights = {
            self.deliver: 30,
            self.answer: 30,
            self.step_worker: 14,
            self.step_learner: 14,
            self.sync: rng.choice(self.syncs),
            self.snapshot: 1,
            self.resend: 2,
            self.kill_worker: rng.choice((0, 1)),
            self.pause_worker: rng.choice((0, 1)),
            self.kill_learner: rng.choice((0, 1)),
            self.power_loss: rng.choice(self.power_losses),
        }
        for action in rng.choices(list(weights), list(weights.values()), k=actions):
            action()
        self.cut = 0.0
        self.go_on(2)

    def go_on(self, steps: int, rounds: int = 600) -> None:
        """Go on without faults: steps must be trained, and everything acknowledged must be there."""
        goal = self.learner.next_step + steps
        for number in range(rounds):
            self.step_worker()
            self.step_learner()
            if number % 40 == 39:
                everybody = (*self.workers, self.learner)
                self.network += [
                    r for client in everybody for r in client.open.values() if client.welcome or r.verb == "hello"
                ]
                for client in (*self.workers, self.learner):
                    self._hello(client)
            for _ in range(4):
                self.deliver()
                self.sync()
                self.answer()
            if self.learner.next_step >= goal and self.learner.phase == "lease":
                self.check_acknowledged()
                return
        raise AssertionError(f"nobody moves: {self.core.explain(self.learner.next_step)}")

    def audit(self) -> Audit:
        """Audit the run from the durable journal alone."""
        run = {"settings": self.began.plain()}
        first = ev.Snapshotted(run, -1, ReplayCore(self.settings, lambda: 0.0).state.image(), ())
        return audit(enumerate([first, *self.journal[: self.durable]]))


def run_seed(seed: int, actions: int = 300, world: type[World] = World) -> World:
    simulated = world(seed)
    try:
        simulated.run(actions)
        found = simulated.audit()
        assert found.balances, found.violations
    except BaseException as error:
        error.add_note(f"seed={seed} actions={actions} settings={simulated.settings} faults={simulated.faults}")
        raise
    return simulated


def main() -> None:
    arguments = argparse.ArgumentParser(description="Simulate the replay core under faults.")
    arguments.add_argument("--seeds", type=int, default=100_000)
    arguments.add_argument("--first", type=int, default=0)
    given = arguments.parse_args()
    faults: dict[str, int] = {}
    steps = acked = events = 0
    started = time.monotonic()
    for seed in range(given.first, given.first + given.seeds):
        simulated = run_seed(seed)
        steps += len(simulated.history)
        acked += len(simulated.acked)
        events += len(simulated.journal)
        for name, count in simulated.faults.items():
            faults[name] = faults.get(name, 0) + count
    print(
        f"{given.seeds} seeds in {time.monotonic() - started:.0f} s: {events} events, {acked} groups acknowledged, "
        f"{steps} steps trained; faults: {dict(sorted(faults.items()))}; 0 lost, 0 trained twice, audits balance"
    )


if __name__ == "__main__":
    main()
