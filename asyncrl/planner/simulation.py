"""A run in virtual time: engines and a learner of which only the costs are simulated, around the real replay core.

    engines ──acquire──▶ ReplayCore ──lease──▶ learner      what happens next is the earliest of a heap of events
            ◀──orders──             ◀─trained──

A group is one trajectory to the core, with the tokens of all its members by version: the gates judge groups by their
tokens alone, and a sixteenth of the headers is a sixteenth of the time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from operator import attrgetter

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.planner.costs import Costs
from asyncrl.planner.engine import Making, Member, SimulatedEngine
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.types import NO_VERSION, Assignment, GroupHeader, StepPlan, TrajectoryHeader

TURN_S = 1.0
"""For which a worker's request waits for orders; then it asks anew, for all places that are free by then."""
BLOCK = 256
"""Groups whose lengths are drawn at once: those of a group depend on the seed and its number alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the costs are spent on."""

    settings: AdmissionSettings
    engines: int
    slots: int
    """Groups that one engine's worker makes at once."""
    max_sequences: int
    """That one engine decodes together."""
    ranks: int
    """Among which the tokens of a step are divided."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One trained step."""

    ended: float
    """Clock, as all times here in seconds."""
    waited: float
    """For its batch."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Loss tokens by their age in versions."""
    pipeline_depth: int
    max_in_flight: int


class Simulation:
    """`run` goes on from where the last one ended. Attributes are for reading."""

    def __init__(self, setup: Setup, costs: Costs, seed: int = 0) -> None:
        self.setup, self.costs, self.seed = setup, costs, seed
        self.now = 0.0
        self.steps: list[Step] = []
        settings = replace(setup.settings, min_group_size=0, group_timeout_s=0.0, curriculum=None)
        if not settings.by_sample:
            settings = replace(settings, group_size=1)  # what is inserted has one trajectory, of all tokens
        self.core = ReplayCore(settings, lambda: self.now, seed=seed, max_bytes=1 << 62, heartbeat_timeout_s=math.inf)
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        self.core.publish(policy_version=0, parent=NO_VERSION)
        pace = [costs.decode.step_s(max(1, batch)) for batch in range(setup.max_sequences + 1)]
        names = [f"w{number}" for number in range(setup.engines)]
        self.engines = {name: SimulatedEngine(name, setup.slots, pace, 0, costs.prompts) for name in names}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._random = np.random.default_rng([seed, 1])
        self._block = (-1, np.zeros((0, 0), np.int64))
        self._asking: list[SimulatedEngine] = []
        """Those whose request waits, in the order in which the server has them."""
        self._full: dict[str, SimulatedEngine] = {}
        """Those that ask and hold their share."""
        self._idle_since: float | None = 0.0
        """The learner has had nothing to train since then."""
        self._sent = 0.0
        """When the last version is served."""
        self._changed = True
        for engine in self.engines.values():
            self.core.hello(engine.name, engine.name, 0)
            # All have asked before there are weights; one after the other they would change everybody's share.
            self.core.workers.note(self.core.workers.live[engine.name], capacity=engine.slots)
            self._ask(engine)

    def run(self, steps: int) -> None:
        """Until so many steps are trained in all.

        Raises:
            ConfigError: nothing can happen any more: the settings lock each other out.
        """
        while len(self.steps) < steps:
            if self._changed:
                self._react()
            if not self._events:
                raise ConfigError(f"this run would wait forever: {self.core.explain(len(self.steps))}")
            self.now, _, happens = heappop(self._events)
            happens()

    @property
    def held_s(self) -> float:
        """Seconds in which workers had groups, all together."""
        for engine in self.engines.values():
            engine.hold(0, self.now)
        return sum(engine.held_s for engine in self.engines.values())

    @property
    def generated(self) -> float:
        """Tokens sampled."""
        for engine in self.engines.values():
            engine.advance(self.now)
        return sum(engine.generated for engine in self.engines.values())

    def _later(self, at: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (at, self._count, happens))

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        """What takes no time happens at once, before all that is due now."""
        if seconds:
            self._later(self.now + seconds, happens)
        else:
            happens()

    def _react(self) -> None:
        """What waits is asked again."""
        self._changed = False
        self._learn()
        self._issue()

    # The workers.

    def _ask(self, engine: SimulatedEngine) -> None:
        """As a worker's loop does: not for each place alone, and one request at a time."""
        if engine.asks or engine.ordered:
            return
        if engine.free and (engine.free >= engine.slots // 8 or not engine.groups):
            engine.asks, engine.asked_at = engine.free, self.now
            self._asking.append(engine)

    def _ask_anew(self, engine: SimulatedEngine) -> None:
        """Its request has ended unanswered as often as it had time to."""
        turns = (self.now - engine.asked_at) // TURN_S
        if engine.asks and turns:
            engine.asks, engine.asked_at = engine.free, engine.asked_at + turns * TURN_S

    def _wait_again(self, engine: SimulatedEngine) -> None:
        """It held its share."""
        insort(self._asking, engine, key=attrgetter("asked_at"))

    def _issue(self) -> None:
        core, asking = self.core, self._asking
        while asking and core.has_work():
            if self.now - asking[0].asked_at >= TURN_S:
                for engine in [each for each in asking if self.now - each.asked_at >= TURN_S]:
                    self._ask_anew(engine)
                asking.sort(key=attrgetter("asked_at"))
            engine = asking.pop(0)
            if not core.may_take(engine.name, engine.name):
                self._full[engine.name] = engine
                continue
            orders = core.acquire(engine.name, engine.name, engine.asks).assignments
            if not orders:
                self._full[engine.name] = engine
                continue
            engine.asks, engine.ordered = 0, engine.ordered + len(orders)
            self._after(self.costs.deliver_s, lambda orders=orders, engine=engine: self._arrived(engine, orders))

    def _lengths(self, group_id: int) -> list[int]:
        block, place = divmod(group_id, BLOCK)
        if self._block[0] != block:
            random = np.random.default_rng([self.seed, 0, block])
            members = self.setup.settings.group_size
            self._block = (block, self.costs.lengths.draw(random, BLOCK, members))
        return self._block[1][place].tolist()

    def _arrived(self, engine: SimulatedEngine, orders: Sequence[Assignment]) -> None:
        """The answer to its request is there."""
        engine.ordered -= len(orders)
        engine.hold(len(orders), self.now)
        self._ask(engine)
        self._changed = True
        self._after(self.costs.prefill_s, lambda: self._begin(engine, orders))

    def _begin(self, engine: SimulatedEngine, orders: Sequence[Assignment]) -> None:
        engine.prefill(len(orders), self.now)
        for order in orders:
            if order.single:
                group_id, place = divmod(order.group_id, self.setup.settings.group_size)
                lengths = self._lengths(group_id)[place : place + 1]
            else:
                lengths = self._lengths(order.group_id)
            group = Making(order, len(lengths))
            for length in lengths:
                engine.add(Member(group, in_turns(length, self.costs.turns)), self.now)
        self._foretell(engine)

    def _foretell(self, engine: SimulatedEngine) -> None:
        engine.turn += 1
        at = engine.next_end()
        if at is not None:
            turn = engine.turn
            self._later(max(at, self.now), lambda: self._ended(engine) if engine.turn == turn else None)

    def _ended(self, engine: SimulatedEngine) -> None:
        for member in engine.ended(self.now):
            if self.costs.environment_s:
                self._later(self.now + self._environment_s(), lambda member=member: self._answered(engine, member))
            else:
                self._answered(engine, member, foretell=False)
        self._foretell(engine)

    def _environment_s(self) -> float:
        sigma = self.costs.environment_sigma
        return self.costs.environment_s * spread(self._random, sigma)

    def _answered(self, engine: SimulatedEngine, member: Member, *, foretell: bool = True) -> None:
        if member.turns:
            engine.prefill(1, self.now)
            engine.add(member, self.now)
            if foretell:
                self._foretell(engine)
            return
        group = member.group
        group.left -= 1
        if group.left:
            return
        if self.costs.handle_s:
            engine.handled = max(self.now, engine.handled) + self.costs.handle_s
            self._later(engine.handled, lambda: self._insert(engine, group))
        else:
            self._insert(engine, group)

    def _insert(self, engine: SimulatedEngine, group: Making) -> None:
        order = group.order
        assert isinstance(order, Assignment)
        tokens = sum(group.tokens.values())
        whole = TrajectoryHeader(
            length=1 + tokens, prompt_length=1, reward=0.0, version_tokens=tuple(sorted(group.tokens.items()))
        )
        header = GroupHeader(
            group_id=order.group_id,
            prompt_index=order.prompt_index,
            attempt=order.attempt,
            worker=engine.name,
            trajectories=(whole,),
            nbytes=1,
        )
        self.core.insert(engine.name, engine.name, header, b"")
        self._changed = True
        self._after(self.costs.deliver_s, lambda: self._inserted(engine))

    def _inserted(self, engine: SimulatedEngine) -> None:
        """Its worker knows, and has a free place."""
        self._ask_anew(engine)
        engine.hold(-1, self.now)
        self._ask(engine)
        if self._full.pop(engine.name, None):
            self._wait_again(engine)
        self._changed = True

    # The learner.

    def _learn(self) -> None:
        step = len(self.steps)
        if self._idle_since is None:
            self.core.lease(step + 1)  # sealed ahead, as the learner's prefetch does
            return
        plan = self.core.lease(step)
        if plan is None:
            return
        waited, self._idle_since = self.now - self._idle_since, None
        tokens = sum(t.loss_tokens for group in plan.groups for t in group.trajectories)
        seconds = self.costs.train_s(tokens, self.setup.ranks) * spread(self._random, self.costs.step_sigma)
        self._later(self.now + seconds, lambda: self._trained(plan, waited))
        self._slow(1 + self.costs.beside)
        self._changed = True  # the next one may be leased by now

    def _slow(self, factor: float) -> None:
        """The engines, beside a learner that trains, or no longer."""
        for engine in self.engines.values() if self.costs.beside else ():
            engine.slow(factor, self.now)
            self._foretell(engine)

    def _trained(self, plan: StepPlan, waited: float) -> None:
        step, settings = plan.step, self.core.run.settings
        self._slow(1.0)
        self.core.trained(step=step, policy_version=step + 1)
        self.core.commit(step)
        # A publication waits for the one before it, and the learner with it.
        free = max(self.now, self._sent)
        self._sent = free + self.costs.sync_s
        self._later(self._sent, lambda: self._served(step + 1))
        self.steps.append(
            Step(
                ended=free,
                waited=waited,
                tokens=plan.tokens_by_staleness(),
                pipeline_depth=settings.pipeline_depth,
                max_in_flight=settings.max_in_flight,
            )
        )
        if free > self.now:
            self._later(free, self._free)
        else:
            self._free()
        self._changed = True

    def _free(self) -> None:
        self._idle_since, self._changed = self.now, True

    def _served(self, version: int) -> None:
        for engine in self.engines.values():
            engine.load(version, self.now, self.costs.stall_s)
            self.core.served(engine.name, engine.name, version, "")
            self._foretell(engine)
        for engine in self._full.values():
            self._wait_again(engine)
        self._full.clear()
        self._changed = True


def in_turns(length: int, turns: int) -> list[int]:
    """`length` tokens as evenly as they go, at least one per turn while there are any."""
    if turns == 1:
        return [length]
    turns = min(turns, length)
    return [length // turns + (turn < length % turns) for turn in range(turns)]


def spread(random: np.random.Generator, sigma: float) -> float:
    """A factor whose mean is 1."""
    return float(math.exp(sigma * random.standard_normal() - sigma**2 / 2)) if sigma else 1.0
