"""What things cost: the seconds that a simulation adds up. Measured in a run (`calibration.py`) or given by hand."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError


class Lengths(Protocol):
    """How many tokens the completions have."""

    def draw(self, random: np.random.Generator, groups: int, members: int) -> NDArray[np.int64]:
        """[groups, members] int64, each at least 1."""
        ...

    @property
    def mean(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`mean` tokens; `sigma` is the standard deviation of the logarithm. Of its variance the share `of_prompt` is the
    prompt's: siblings are long together. What is over `longest` is cut there, so the mean drawn can be below."""

    mean_: float
    sigma: float
    longest: int
    of_prompt: float = 0.5

    def draw(self, random: np.random.Generator, groups: int, members: int) -> NDArray[np.int64]:
        prompt = math.sqrt(self.of_prompt) * random.standard_normal((groups, 1))
        own = math.sqrt(1 - self.of_prompt) * random.standard_normal((groups, members))
        # E exp(sigma z) = exp(sigma^2 / 2): without it the mean would grow with sigma.
        logs = math.log(self.mean_) - self.sigma**2 / 2 + self.sigma * (prompt + own)
        return np.clip(np.rint(np.exp(logs)), 1, self.longest).astype(np.int64)

    @property
    def mean(self) -> float:
        return self.mean_


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths as a run had them: `counts[i]` of `edges[i] <= n < edges[i + 1]`, drawn evenly within a bin."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    def draw(self, random: np.random.Generator, groups: int, members: int) -> NDArray[np.int64]:
        shares = np.asarray(self.counts) / sum(self.counts)
        bins = random.choice(len(shares), size=(groups, members), p=shares)
        low, high = np.asarray(self.edges[:-1])[bins], np.asarray(self.edges[1:])[bins]
        return np.maximum(1, np.floor(low + random.random((groups, members)) * (high - low))).astype(np.int64)

    @property
    def mean(self) -> float:
        middles = [(low + high - 1) / 2 for low, high in zip(self.edges, self.edges[1:], strict=False)]
        total = sum(max(1.0, middle) * count for middle, count in zip(middles, self.counts, strict=True))
        return total / sum(self.counts)


@dataclass(frozen=True, slots=True)
class Decode:
    """Seconds of one step of an engine, by the sequences decoded (or the prompts prefilled) together: linear between
    the points, constant below the first, and beyond the last with the slope of the last two."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.points]
        if not batches or batches != sorted(set(batches)) or batches[0] < 1:
            raise ConfigError(f"the batches of an engine's speed must increase from 1 or more; got {batches}")
        if min(seconds for _, seconds in self.points) <= 0:
            raise ConfigError("an engine's speed must be above 0 tokens/s at every batch")

    @classmethod
    def of_line(cls, fixed: float, each: float, most: int) -> Decode:
        """Seconds are `fixed + each * batch`, known up to `most`."""
        most = max(2, most)
        return cls(((1, max(fixed + each, 1e-9)), (most, max(fixed + each * most, 1e-9))))

    @classmethod
    def of_rates(cls, rates: Sequence[tuple[int, float]]) -> Decode:
        """`rates`: (sequences decoded together, tokens/s of all of them)."""
        if not all(0 < rate < math.inf for _, rate in rates):  # of a number that is none no simulation comes to an end
            raise ConfigError("an engine's speed must be above 0 tokens/s at every batch")
        return cls(tuple((batch, batch / rate) for batch, rate in rates))

    def step_s(self, batch: int) -> float:
        points = self.points
        if batch <= points[0][0] or len(points) == 1:
            return points[0][1]
        after = min(max(1, bisect_left(points, (batch, 0.0))), len(points) - 1)
        (low, slow), (high, fast) = points[after - 1], points[after]
        return max(slow + (fast - slow) * (batch - low) / (high - low), 1e-9)

    def scaled(self, factor: float) -> Decode:
        return Decode(tuple((batch, seconds * factor) for batch, seconds in self.points))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    decode: Decode
    lengths: Lengths
    prompts: Decode | None = None
    """For so long an engine decodes nothing, by the prompts that come at once; then their sequences have their first
    tokens. None: prompts cost it nothing, and first tokens are decoded like all others."""
    beside: float = 0.0
    """By this share of them an engine's steps are longer while the learner trains: the two share processors or
    memory."""
    prefill_s: float = 0.0
    """From an order until the first token of its group: rendering, prefill."""
    deliver_s: float = 0.0
    """Until a worker has the replay server's answer: to its request for groups, and to a group that it inserted, whose
    place is free only then."""
    handle_s: float = 0.0
    """Before that, for which its worker handles it: one group after the other."""
    turns: int = 1
    """In which a completion is sampled; after each the environment answers, or scores."""
    environment_s: float = 0.0
    """Of each of these answers, on average."""
    environment_sigma: float = 0.0
    """Standard deviation of their logarithm."""
    step_s: float = 0.0
    """Of a train step, whatever is in it."""
    token_s: float = 0.0
    """More, per loss token of a step; of one rank alone."""
    step_sigma: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    sync_s: float = 0.0
    """From the publication of a version until all engines serve it."""
    stall_s: float = 0.0
    """For which an engine stands still to load it."""

    def slower(self, factor: float) -> Costs:
        """With engines whose steps take `factor` times as long."""
        prompts = None if self.prompts is None else self.prompts.scaled(factor)
        return replace(self, decode=self.decode.scaled(factor), prompts=prompts)

    def train_s(self, tokens: float, ranks: int) -> float:
        """Mean seconds of a train step."""
        return self.step_s + self.token_s * tokens / ranks
