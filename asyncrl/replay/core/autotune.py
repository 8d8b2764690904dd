"""`rollout.autotune`: how far the rollouts may run ahead, moved while the run goes on so that the learner is busy at
the lowest staleness. Pure: steps go in, moves come out.

What is in flight gets older while it is made, and what lies in store while it waits. So as little is to be in flight as
makes as many tokens per second as the learner can train, or, where that is not to be had, nearly as many as all that is
allowed would; and the depth is to have room for that and a batch that gathers.

    the learner is busy    in flight is what was in flight on average, and a little more; no room for a batch in store
    it waits, and the depth holds the engines back     the depth grows to what would be needed
    it waits for the engines    other numbers in flight are tried, from the rates at those that were (`Engines`)

So that it never oscillates: between the two thresholds, and for changes that are too small, nothing is done (deadband);
after a move the groups of before are trained first, then `MEASURED` steps are looked at (rate limit); what was measured
is remembered, and what was in vain is tried again only after a time that doubles each time, unless the run has changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

BUSY, WAITS, BADLY = 0.02, 0.04, 0.1
"""Shares of the time: a learner that waits less is busy; one that waits more waits; if less than badly, it is looked at
twice."""
MEASURED = 6
"""Steps that a decision rests on."""
NEAR_BEST, ENOUGH = 0.975, 0.98
"""Of the tokens/s that all that may be in flight would make: more are not worth their staleness. And of those that are
aimed at: with so many it stays where it is."""
SPARE = 1.05
"""By so much the engines are to be faster than the learner, which varies."""
DEADBAND = 1.15
"""Factor of groups in flight, between what is there and what a busy learner needs."""
SHALLOWER = 1.05
"""Factor of groups in flight, between what is there and what one depth less has room for."""
CLOSE_ABOVE, CLOSE = 1.05, 1.2
"""Factors of groups in flight, more and fewer, that are not worth a move."""
FARTHEST_UP, FARTHEST_DOWN = 4.0, 0.5
"""Factors of one move."""
STEADY = 0.87
"""Of the groups allowed in flight: where less is, the depth is what holds the engines back."""
ALIKE, REMEMBERED = 1.06, 24
"""Factor between numbers in flight that are taken for one; what is known of it is of about so many steps."""
CHANGED = 1.3
"""Factor between what is known and what is measured, twice in a row: the run has changed, what was learned is void."""
HOLD, LONGEST_HOLD = 100, 1600
"""Steps for which what was in vain is left alone: at first, and at most."""
TURNS = 2
"""Moves back to what was known, after which it rests."""
DEEPEST_LOOKS, MOST_LOOKS, DEEPEST_GAIN = 3, 8, 0.02
"""Epochs at one less than the deepest that is allowed, and as many there at least and at most; it is left where it is
clear that it is not better by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the run's settings allow."""

    groups_per_step: int
    deepest: int
    """The most that `pipeline_depth` may be."""
    most_in_flight: int
    least_s: float = 0.0
    """A decision rests on so many seconds at least: what is generated is told now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One trained step."""

    seconds: float
    """Since the one before."""
    waited_s: float
    """Of them, the learner had nothing to train."""
    in_flight: float
    """Groups, mean over these seconds."""
    generated: float
    """Tokens, by all engines."""
    trained: int
    """Tokens that bore a gradient."""
    wasted: int
    """Tokens that were too old to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is moved."""

    pipeline_depth: int
    max_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    bounds: Bounds
    reason: str


@dataclass(slots=True)
class Tried:
    """What was found not to do, and is believed for a time that doubles each time it is found."""

    value: float = 0.0
    left: int = 0
    hold: int = HOLD

    def note(self, value: float) -> None:
        if value > self.value:
            self.value, self.left, self.hold = value, self.hold, min(2 * self.hold, LONGEST_HOLD)

    def age(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.value = 0.0

    @property
    def is_over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """Steps that were looked at together."""

    rate: float
    """Tokens made per second, but for the share that gets too old to be trained."""
    waits: float
    """Share of the time."""
    in_flight: float
    steps: int

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> Epoch:
        """What is generated is a steadier measure than what is trained, of which a batch more or less is in it."""
        seconds = max(sum(each.seconds for each in seen), 1e-9)
        trained, wasted = sum(each.trained for each in seen), sum(each.wasted for each in seen)
        fresh = max(1, trained) / max(1, trained + wasted)
        return cls(
            rate=max(1.0, sum(each.generated for each in seen) or trained) * fresh / seconds,
            waits=min(1.0, sum(each.waited_s for each in seen) / seconds),
            in_flight=max(1e-3, sum(each.in_flight * each.seconds for each in seen) / seconds),
            steps=len(seen),
        )

    def size(self) -> float:
        return self.in_flight

    def with_(self, other: Epoch) -> Epoch:
        """Both together, as far as that is not long ago."""
        share = other.steps / (other.steps + min(self.steps, REMEMBERED))
        return Epoch(
            rate=self.rate + share * (other.rate - self.rate),
            waits=self.waits + share * (other.waits - self.waits),
            in_flight=self.in_flight + share * (other.in_flight - self.in_flight),
            steps=min(self.steps, REMEMBERED) + other.steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Seconds from which a group in flight makes a token: `alone + each * n` with n in flight."""

    alone: float
    each: float

    @classmethod
    def near(cls, epochs: Sequence[Epoch], in_flight: float) -> Engines:
        """By the two epochs that are nearest; of a single one, groups are taken not to slow each other down."""
        found = sorted(epochs, key=lambda epoch: abs(math.log(epoch.in_flight / in_flight)))[:2]
        low, high = min(found, key=Epoch.size), max(found, key=Epoch.size)
        took = high.in_flight / high.rate
        if low is high:
            return cls(alone=took, each=0.0)
        each = (took - low.in_flight / low.rate) / (high.in_flight - low.in_flight)
        each = min(max(each, 0.0), 1 / high.rate)
        return cls(alone=took - each * high.in_flight, each=each)

    def rate(self, in_flight: float) -> float:
        return in_flight / (self.alone + self.each * in_flight)

    def needed(self, rate: float) -> float:
        """In flight, for so many tokens per second; infinity where they are not to be had."""
        left = 1 - self.each * rate
        return self.alone * rate / left if left > 1e-9 else math.inf


class Tuner:
    """`step` is told every trained step."""

    def __init__(self, limits: Limits, bounds: Bounds) -> None:
        self.limits, self.bounds = limits, bounds
        self._seen: list[Seen] = []
        self._known: list[Epoch] = []
        """Of steps in which the engines were what was waited for; about as many in flight are one."""
        self._strange = 0
        """Epochs in a row that were unlike what is known."""
        self._settling = 2 + min(bounds.pipeline_depth, 4)
        self._waited = self._was_busy = False
        """The learner; in the epoch before this one, and ever."""
        self._room = 0
        """Batches for which the depth has room beside those in flight and the one in training."""
        self._too_few, self._cramped, self._rest = Tried(), Tried(), Tried()
        """Groups in flight that a busy learner came to wait for; 1 while a batch in store is needed; 1 while what is
        known of the engines is left at that."""
        self._turns = 0
        """Moves to what was known."""
        self._dive = Dive()

    def step(self, seen: Seen) -> Move | None:
        """What to change before the next group is admitted; None, mostly."""
        self._too_few.age()
        self._cramped.age()
        self._rest.age()
        if self._settling > 0:
            self._settling -= 1
            return None
        self._seen.append(seen)
        if len(self._seen) < MEASURED or sum(each.seconds for each in self._seen) < self.limits.least_s:
            return None
        epoch = Epoch.of(self._seen)
        self._seen.clear()
        before = self.bounds
        self.bounds, reason = self._decide(epoch)
        self._waited = epoch.waits > WAITS and self.bounds == before
        if self.bounds == before:
            return None
        batch = self.limits.groups_per_step
        most = max(before.max_in_flight, self.bounds.max_in_flight)
        self._settling = 1 + min(-(-most // batch), 1 + self.bounds.pipeline_depth)
        return Move(bounds=self.bounds, reason=reason)

    def interrupted(self, *, others: bool = False) -> None:
        """The steps so far say nothing of those to come: a learner was restored, or nothing was admitted for a while.
        `others`: nor does what is known, for there are other engines."""
        self._seen.clear()
        self._settling = max(self._settling, 2)
        if others:
            self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._dive, self._rest = Dive(), Tried()

    def _decide(self, epoch: Epoch) -> tuple[Bounds, str]:
        bounds = self.bounds
        said = f"the learner waited {epoch.waits:.1%} of the time with {epoch.in_flight:.1f} groups in flight"
        if epoch.waits <= BUSY:
            return self._trim(epoch), f"{said}: more than it needs"
        if epoch.waits <= WAITS or (epoch.waits < BADLY and not self._waited):
            return bounds, ""
        held_back = epoch.in_flight < STEADY * bounds.max_in_flight
        if held_back and bounds.pipeline_depth < self._depth(bounds.max_in_flight, 1):
            return self._deepen(epoch), f"{said}: the depth held back the others"
        if self._dive.dives:
            self._dive.look(epoch, deepest=True)
            if not self._dive.dives:
                self._known.clear()  # of another depth
            return self._to(bounds.max_in_flight), f"{said}: {self._dive.said}"
        if bounds.pipeline_depth > self._depth(self.limits.most_in_flight, 1):
            return self._to(bounds.max_in_flight), f"{said}: the deepest that is allowed is tried later"
        to = self._feed(self._note(replace(epoch, in_flight=float(bounds.max_in_flight))))
        if to == bounds and held_back and bounds.pipeline_depth == self.limits.deepest - 1:
            self._dive.look(epoch, deepest=False)
            return self._to(bounds.max_in_flight), f"{said}: {self._dive.said}"
        return to, f"{said}, {epoch.rate:.4g} tokens/s"

    def _trim(self, epoch: Epoch) -> Bounds:
        """The learner is busy."""
        self._was_busy = True
        bounds = self.bounds
        wanted = DEADBAND * max(epoch.in_flight, self._too_few.value)
        wanted = max(wanted, FARTHEST_DOWN * bounds.max_in_flight)
        if self._cramped.is_over:
            self._room = 0
        if wanted * DEADBAND >= bounds.max_in_flight:
            shallower = self.limits.groups_per_step * (bounds.pipeline_depth - 1 - self._room)
            fits = SHALLOWER * max(epoch.in_flight, self._too_few.value) <= shallower < bounds.max_in_flight
            wanted = shallower if fits else bounds.max_in_flight
        to = self._to(wanted)
        return replace(to, pipeline_depth=min(to.pipeline_depth, bounds.pipeline_depth))

    def _deepen(self, epoch: Epoch) -> Bounds:
        """The depth holds the engines back."""
        limits, bounds = self.limits, self.bounds
        needed = min(SPARE * epoch.in_flight / max(1 - epoch.waits, 0.01), FARTHEST_UP * epoch.in_flight)
        if needed < bounds.max_in_flight and self._depth(needed, 0) > bounds.pipeline_depth:
            return self._to(needed)
        if bounds.max_in_flight < min(limits.most_in_flight, 2 * epoch.in_flight):
            self._too_few.note(bounds.max_in_flight)
            return self._to(1.3 * bounds.max_in_flight)
        self._room = 1
        self._cramped.note(1)
        return self._to(bounds.max_in_flight)

    def _note(self, epoch: Epoch) -> Epoch:
        """Learn it; returns all that is known of about as many in flight."""
        for place, known in enumerate(self._known):
            if 1 / ALIKE < epoch.in_flight / known.in_flight < ALIKE:
                if 1 / CHANGED < epoch.rate / known.rate < CHANGED:
                    self._strange = 0
                    self._known[place] = known.with_(epoch)
                    return self._known[place]
                self._strange += 1
                if self._strange < 2:
                    return known
                self._forget()
                self._strange = 0
                break
        self._known.append(epoch)
        return epoch

    def _feed(self, here: Epoch) -> Bounds:
        """The engines are what the learner waits for: towards the fewest in flight with which they are fast enough."""
        limits, bounds, known = self.limits, self.bounds, self._known
        most = max(each.rate for each in known)
        if max(each.in_flight for each in known) * ALIKE < limits.most_in_flight:
            most = max(most, Engines.near(known, limits.most_in_flight).rate(limits.most_in_flight))
        learner = SPARE * here.rate / max(1 - here.waits, 0.01)
        goal = min(learner, NEAR_BEST * most)  # tokens per second
        self._room = int(goal < learner or not self._cramped.is_over)
        if self._room and self._was_busy:
            self._cramped.note(1)
        enough = min((each for each in known if each.rate >= ENOUGH * goal), key=Epoch.size, default=None)
        scarce = [each for each in known if each.rate < ENOUGH * goal]
        if enough is None:
            wanted = min(Engines.near(known, here.in_flight).needed(goal), FARTHEST_UP * here.in_flight)
            if goal == learner and self._was_busy and len(known) > 1:
                self._too_few.note(bounds.max_in_flight)
                wanted = max(wanted, DEADBAND * bounds.max_in_flight)
            elif not self._rest.is_over:
                wanted = bounds.max_in_flight
            return self._unless_close(min(wanted, limits.most_in_flight), CLOSE_ABOVE)
        if enough is not here:
            self._turns += 1
            if self._turns % TURNS == 0:
                self._rest.note(1)
            return self._to(enough.in_flight)
        fewer = max((each for each in scarce if each.in_flight < here.in_flight), key=Epoch.size, default=None)
        wanted = FARTHEST_DOWN * here.in_flight
        if fewer is not None:
            wanted = max(wanted, Engines.near((fewer, here), 1).needed(goal), DEADBAND * fewer.in_flight)
        wanted = min(here.in_flight, max(wanted, DEADBAND * self._too_few.value))
        return self._unless_close(wanted if self._rest.is_over else here.in_flight, CLOSE)

    def _unless_close(self, in_flight: float, factor: float) -> Bounds:
        now = self.bounds.max_in_flight
        return self._to(now if 1 / factor < in_flight / now < factor else in_flight)

    def _depth(self, in_flight: float, room: int) -> int:
        limits = self.limits
        deepest = limits.deepest if self._dive.deepest_is_better or limits.deepest < 2 else limits.deepest - 1
        return min(deepest, math.ceil(in_flight / limits.groups_per_step) + room)

    def _to(self, in_flight: float) -> Bounds:
        in_flight = min(max(1, math.ceil(in_flight)), self.limits.most_in_flight)
        return Bounds(pipeline_depth=self._depth(in_flight, self._room), max_in_flight=in_flight)


class Dive:
    """Whether the deepest that is allowed is better than one less: only there are groups admitted to nobody but who
    serves the newest version, which may cost more than a batch more brings. Epochs of the one, then of the other."""

    def __init__(self) -> None:
        self.rates: tuple[list[float], list[float]] = [], []
        self.deepest_is_better = self.is_over = False
        self.said = ""

    @property
    def dives(self) -> bool:
        """It is being tried."""
        return self.deepest_is_better and not self.is_over

    def look(self, epoch: Epoch, *, deepest: bool) -> None:
        if self.is_over:
            return
        less, most = self.rates
        (most if deepest else less).append(epoch.rate)
        if len(less) < DEEPEST_LOOKS:
            return
        if len(most) < DEEPEST_LOOKS or self._is_unsure():
            self.deepest_is_better, self.said = True, "whether the deepest that is allowed is better"
            return
        self.is_over, self.deepest_is_better = True, self._gain() + self._error() > DEEPEST_GAIN
        self.said = f"the deepest that is allowed made {self._gain():+.1%} tokens/s"

    def _gain(self) -> float:
        less, most = self.rates
        return statistics.mean(most) / statistics.mean(less) - 1

    def _error(self) -> float:
        """Standard error of the gain."""
        less, most = self.rates
        error = math.hypot(*(statistics.stdev(rates) / math.sqrt(len(rates)) for rates in (less, most)))
        return error / statistics.mean(less)

    def _is_unsure(self) -> bool:
        """And not for long yet."""
        return len(self.rates[1]) < MOST_LOOKS and abs(self._gain() - DEEPEST_GAIN) < self._error()
