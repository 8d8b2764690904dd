"""A run in one process whose data has a fixed staleness: the parts of a run, with a delay line for the weights.

Engine, environment, rewards, the pure core of the replay, advantages, loss, learner loop and evaluation are those of a
run, put together by the same composition roots. Missing is what decides in a run how old data gets: servers, sockets,
and rollouts concurrent with the learner. The weights of each version go into a delay line, and the batch of step s is
generated with those of version max(0, s - age): from step `age` on every token is exactly `age` versions old. The
prompts, the draws and the order of the groups follow from the seed. Which sequences the engine decodes in one batch
depends on timing, and so does the rounding of their log-probs: a repeated run is another sample.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from asyncrl.balance import shard_step
from asyncrl.checks.evaluations import eval_sets
from asyncrl.engines.base import Engine
from asyncrl.engines.factory import make_engine
from asyncrl.environments.guard import close_environment
from asyncrl.evaluation.orders import EvalAssignment, EvalResult, EvalSummary
from asyncrl.learner.assembly import assemble
from asyncrl.learner.parallel.place import Place
from asyncrl.learner.train import train
from asyncrl.replay.codec.extras import plain_extras
from asyncrl.replay.codec.group import group_header
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.protocol import Lease, Member, Restored, TrainedReply
from asyncrl.rollout.groups.episode import EpisodeRunner
from asyncrl.rollout.rewards.factory import make_rewards
from asyncrl.rollout.rewards.watch import RewardWatch
from asyncrl.rollout.worker.report import WorkerReport
from asyncrl.rollout.worker.wiring import (
    Scoring,
    Texts,
    environment_of,
    evaluation_of,
    group_shape,
    load_texts,
    make_runner,
)
from asyncrl.rollout.worker.worker import Evaluate
from asyncrl.schema import Config
from asyncrl.telemetry.metrics.evaluations import is_evaluation
from asyncrl.types import NO_VERSION, Assignment, StepPlan, Trajectory, TrajectoryGroup
from asyncrl.weights.base import Canary, PublishStats

WORKER, INCARNATION = "held", "one"
PATIENCE_S = 600.0
"""Limit in seconds on the wait for the step before to be trained, and for the event loop. Neither can take as long."""

Result = TypeVar("Result")


class Rollouts:
    """The parts by which a rollout worker generates and scores, on an event loop in a thread of its own. A context
    manager."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._opened = AsyncExitStack()
        self.texts: Texts
        self.engine: Engine
        self._runner: EpisodeRunner
        self._evaluations: dict[str, Evaluate]

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._opened.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _open(self) -> None:
        config, opened, report = self._config, self._opened, WorkerReport()
        self.texts = texts = load_texts(config)
        environment = environment_of(config, texts)
        opened.push_async_callback(close_environment, environment)
        rewards = await opened.enter_async_context(make_rewards(config))
        self.engine = engine = make_engine(config)
        opened.push_async_callback(engine.close)
        self._runner = make_runner(config, texts, engine, environment, rewards, report=report, watch=RewardWatch())
        known = [Scoring(config.environment, config.reward, environment, rewards)]
        self._evaluations = {
            each.name: await evaluation_of(each, texts, engine, known, opened, report) for each in eval_sets(config)
        }

    def groups(self, assignments: Sequence[Assignment]) -> list[TrajectoryGroup]:
        """Generate the groups concurrently, as a worker does."""
        return self._wait(self._groups(assignments))

    async def _groups(self, assignments: Sequence[Assignment]) -> list[TrajectoryGroup]:
        made = (
            self._runner.run_group(
                each,
                self.texts.prompts[each.prompt_index],
                shape=group_shape(self._config.rollout),
                sampling=self.texts.sampling,
                worker=WORKER,
            )
            for each in assignments
        )
        return list(await asyncio.gather(*made))

    def evaluate(self, assignment: EvalAssignment) -> EvalResult:
        return self._wait(self._evaluate(assignment))

    async def _evaluate(self, assignment: EvalAssignment) -> EvalResult:
        return await self._evaluations[assignment.eval_set](assignment)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """waits for: the loop's thread; unblocked by: the end of `work`, or an exception that it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


class DelayLine:
    """A `Publisher` that keeps the weights of each version until no batch can ask for them any more."""

    def __init__(self, age: int) -> None:
        self._age = age
        self._versions: dict[int, dict[str, Tensor]] = {}
        self.changed = threading.Condition()

    @property
    def newest(self) -> int:
        return max(self._versions, default=NO_VERSION)

    def weights(self, version: int) -> Mapping[str, Tensor]:
        return self._versions[version]

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        copied = {name: tensor.detach().clone() for name, tensor in tensors}
        with self.changed:
            self._versions[policy_version] = copied
            self._versions.pop(policy_version - self._age - 1, None)
            self.changed.notify_all()
        return PublishStats(wait_previous_s=0.0, nbytes=sum(tensor.nbytes for tensor in copied.values()))

    meets = False

    def wait_sent(self) -> float:
        return 0.0

    def wait(self) -> float:
        return 0.0

    def serve(self) -> None:
        return

    def stats(self) -> dict[str, float]:
        return {}

    def close(self, *, failed: bool = False) -> None:
        return


class HeldReplay:
    """A `LearnerReplay`: the core of the replay with one worker, which generates groups when the learner asks for them.

    A batch is generated after the step before is trained, never during it, so that timing does not decide which prompts
    and weights it has.

    Args:
        age: versions between the weights that generate and the newest.
        groups: number of groups generated before each step; more only while a batch cannot be filled.
    """

    def __init__(self, config: Config, rollouts: Rollouts, line: DelayLine, *, age: int, groups: int) -> None:
        self._rollouts, self._line, self._age, self._groups = rollouts, line, age, groups
        settings = AdmissionSettings.from_config(config)
        self._core = ReplayCore(settings, time.monotonic, seed=config.seed, heartbeat_timeout_s=PATIENCE_S)
        self._core.hello(WORKER, INCARNATION)
        self._lock = threading.RLock()
        """Guards engine and core, which only one thread may use at a time: the learner leases batches in a thread."""
        self._made_for = -1
        self._generated = 0
        self.generated_by: list[int] = []
        """Total loss tokens generated for the batches up to each step."""

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
        return self._core.restore(
            step=step, policy_version=policy_version, snapshot=snapshot, incarnation="learner", settings=settings
        )

    def publish(self, *, policy_version: int, parent: int) -> None:
        self._core.publish(policy_version=policy_version, parent=parent)

    def lease(self, *, step: int, rank: int, world: int, wait_s: float) -> Lease:
        """waits for: the weights of the step before; unblocked by: their publication, or `PATIENCE_S`."""
        with self._line.changed:
            if not self._line.changed.wait_for(lambda: self._line.newest >= step, PATIENCE_S):
                raise TimeoutError(f"step {step - 1} was not trained within {PATIENCE_S:.0f} s")
        with self._lock:
            if self._made_for < step:
                self._make(step)
            while (plan := self._core.lease(step)) is None:
                self._make(step)
            self.generated_by[step:] = [self._generated]
            return self._lease(plan, world)

    def _make(self, step: int) -> None:
        """Generate the groups of one step, with weights that are `age` versions old."""
        self._made_for = step
        self._serve(max(0, step - self._age))
        acquired = self._core.acquire(WORKER, INCARNATION, self._groups)
        if not acquired.assignments:
            raise AssertionError(f"no group may be made: {acquired.waiting_for}; {self._core.explain(step)}")
        for group in self._rollouts.groups(acquired.assignments):
            header = group_header(group)
            self._generated += sum(trajectory.loss_tokens for trajectory in header.trajectories)
            reply = self._core.insert(WORKER, INCARNATION, header, group)
            if reply.status != "accepted":
                raise AssertionError(f"group {header.group_id} was {reply.status}: {reply.reason}")

    def _serve(self, version: int) -> None:
        if self._rollouts.engine.policy_version != version:
            self._rollouts.engine.load_weights(version, self._line.weights(version))
        self._core.served(WORKER, INCARNATION, version, "")

    def _lease(self, plan: StepPlan, world: int) -> Lease:
        (places,) = shards = shard_step(plan, world)
        entries = self._core.state.ledger
        groups = [entries.entry(header.group_id).payload for header in plan.groups]
        return Lease(
            plan=replace(plan, shards=shards), trajectories={(g, t): sent(groups[g].trajectories[t]) for g, t in places}
        )

    def trained(self, *, step: int, policy_version: int) -> TrainedReply:
        with self._lock:
            return self._core.trained(step=step, policy_version=policy_version)

    def commit(self, *, step: int) -> None:
        with self._lock:
            self._core.commit(step)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return self._core.snapshot()

    def evaluate(self, *, step: int, policy_version: int, eval_set: str, rows: int, chunk: int) -> int:
        """Evaluate at once, with the weights of exactly `policy_version`."""
        with self._lock:
            job = self._core.evaluate(
                step=step, policy_version=policy_version, eval_set=eval_set, rows=rows, chunk=chunk
            )
            self._serve(policy_version)
            while self._core.evaluations.wanted:
                (assignment,) = self._core.acquire(WORKER, INCARNATION, 1).evaluations
                self._core.report_evaluation(WORKER, INCARNATION, self._rollouts.evaluate(assignment))
            return job

    def wait_evaluations(self, *, wait_s: float) -> tuple[EvalSummary, ...]:
        with self._lock:
            return self._core.finished_evaluations() or ()

    def announce(self, values: dict[str, Any]) -> None:
        return

    def members(self) -> list[Member]:
        return self._core.members()

    def finish(self) -> None:
        with self._lock:
            self._core.finish()

    def close(self) -> None:
        return


def sent(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as the learner gets it over the wire."""
    return replace(trajectory, extras=plain_extras(trajectory.extras)) if trajectory.extras else trajectory


@dataclass
class Rows:
    """The log of a run, in memory."""

    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        (self.evaluations if is_evaluation(row) else self.steps).append({"step": step, **row})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str = "") -> None:
        return

    def histograms(self, step: int, found: Mapping[str, tuple[list[float], list[float]]]) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class HeldRun:
    rows: Rows
    generated_by: list[int]
    """Total loss tokens generated for the batches up to each step."""


def run_held(config: Config, rollouts: Rollouts, *, age: int, groups: int = 0) -> HeldRun:
    """Do a whole run of `config` with data that is `age` versions old.

    Args:
        rollouts: made of the same settings, except loss, learner and seed. Its prompts must be those of this seed.
        groups: number of groups generated before each step; 0: as many as a step trains.
    """
    line, rows = DelayLine(age), Rows()
    replay = HeldReplay(config, rollouts, line, age=age, groups=groups or config.learner.groups_per_step)
    place = Place(rank=0, world=1, device=torch.device("cpu"), restarted=False, run_id="held")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        parts = assemble(
            config,
            place,
            opened,
            backend=None,
            replay=replay,
            run_dir=Path(folder),
            resume="never",
            publisher=lambda _: line,
            log=lambda _: rows,
        )
        train(config, parts)
    return HeldRun(rows, replay.generated_by)
