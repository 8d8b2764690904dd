"""One engine in virtual time: sequences that are decoded together, one token each per decode step.

Time of an engine is the number of its decode steps. A sequence of n tokens that starts at step s ends at s + n however
often the batch changes, so only the next end has to be looked at, and what a change of the batch alters is how long a
step takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from asyncrl.planner.costs import Decode

EPSILON = 1e-9
"""Of a decode step: what rounding leaves of the last token."""


@dataclass(slots=True, eq=False)
class Making:
    """A group under way."""

    order: object
    left: int
    """Members that have no reward yet."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Version -> tokens that it sampled."""


@dataclass(slots=True, eq=False)
class Member:
    """A trajectory under way."""

    group: Making
    turns: list[int]
    """Tokens of the turns to come, the next one last."""
    started: float = 0.0
    """Decode step at which its turn began."""


class SimulatedEngine:
    """Args:
    pace: seconds of a decode step by the sequences in it, from 0 to the most that are decoded together.
    prompts: seconds of a prefill by the prompts in it; None: there is none, first tokens are decoded.
    """

    def __init__(
        self, name: str, slots: int, pace: Sequence[float], served: int, prompts: Decode | None = None
    ) -> None:
        self.name, self.slots, self._pace, self._prompts = name, slots, pace, prompts
        self._first = 0 if prompts is None else 1
        """Tokens that a sequence has of its prefill."""
        self.most = len(pace) - 1
        self.groups = self.ordered = 0
        """Groups that its worker has, and those that are on their way to it."""
        self.asks, self.asked_at = 0, 0.0
        """Places for which its worker's request waits, and since when; 0: it has not asked."""
        self.turn = 0
        """Grows with every change of the batch: what was foretold before it is wrong."""
        self.handled = 0.0
        """When its worker has handled the groups that are finished."""
        self.held_s = 0.0
        """In which its worker had a group."""
        self._held_since = 0.0
        self.generated = 0.0
        """Tokens sampled."""
        self._slower = 1.0
        """So many times longer steps take than `pace` says."""
        self._running: list[tuple[float, int, Member]] = []
        self._waiting: deque[Member] = deque()
        self._count = 0
        self._steps, self._at = 0.0, 0.0
        self._loaded_at, self._loaded = [0.0], [served]

    @property
    def free(self) -> int:
        return self.slots - self.groups - self.ordered

    def hold(self, more: int, now: float) -> None:
        """Its worker has so many groups more."""
        self.held_s += now - self._held_since if self.groups else 0.0
        self._held_since = now
        self.groups += more

    def add(self, member: Member, now: float) -> None:
        """Its next turn waits for a place, or begins."""
        self.advance(now)
        if len(self._running) < self.most:
            self._begin(member)
        else:
            self._waiting.append(member)

    def prefill(self, prompts: int, now: float) -> None:
        """It decodes nothing meanwhile."""
        self.advance(now)
        if self._prompts is not None:
            self._at = max(self._at, now) + self._prompts.step_s(prompts)

    def load(self, version: int, now: float, stall_s: float) -> None:
        """From here on tokens are of `version`."""
        self.advance(now)
        self._loaded_at.append(self._steps)
        self._loaded.append(version)
        self._at = max(self._at, now) + stall_s

    def slow(self, factor: float, now: float) -> None:
        """From here on decode steps take `factor` times as long as `pace` says."""
        self.advance(now)
        self._slower = factor

    def advance(self, now: float) -> None:
        if now <= self._at:
            return
        if self._running:
            steps = (now - self._at) / (self._pace[len(self._running)] * self._slower)
            self._steps += steps
            self.generated += steps * len(self._running)
        self._at = now

    def next_end(self) -> float | None:
        """When the next turn of a sequence ends if nothing else happens; None: nothing is decoded."""
        if not self._running:
            return None
        left = max(0.0, self._running[0][0] - self._steps)
        return self._at + left * self._pace[len(self._running)] * self._slower

    def ended(self, now: float) -> list[Member]:
        """Those whose turn is over by now; their places are taken by those that wait."""
        self.advance(now)
        found: list[Member] = []
        # Late in a long run no number lies between now and the end of the last token.
        while (end := self.next_end()) is not None and (end <= now or self._running[0][0] <= self._steps + EPSILON):
            member = heappop(self._running)[2]
            self._count_tokens(member)
            found.append(member)
            if self._waiting:
                self._begin(self._waiting.popleft())
        return found

    def _begin(self, member: Member) -> None:
        member.started = self._steps
        self.generated += self._first
        self._count += 1
        heappush(self._running, (self._steps + member.turns[-1] - self._first, self._count, member))

    def _count_tokens(self, member: Member) -> None:
        length, tokens = member.turns.pop(), member.group.tokens
        place = bisect_right(self._loaded_at, member.started) - 1
        done = 0
        while place + 1 < len(self._loaded):
            until = min(length, self._first + round(self._loaded_at[place + 1] - member.started))
            if until > done:
                version = self._loaded[place]
                tokens[version] = tokens.get(version, 0) + until - done
                done = until
            place += 1
        if length > done:
            version = self._loaded[place]
            tokens[version] = tokens.get(version, 0) + length - done
