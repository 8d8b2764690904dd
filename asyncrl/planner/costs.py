"""Costs: the seconds that a simulation adds up. They are measured in a run (`calibration`) or given by the user
(`given`)."""

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
    """The distribution of the number of tokens in a completion."""

    def draw(self, random: np.random.Generator, groups: int, members: int) -> NDArray[np.int64]:
        """[groups, members] int64, each at least 1."""
        ...

    @property
    def mean(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution with the mean `mean_`. `sigma` is the standard deviation of the logarithm. The share
    `of_prompt` of its variance belongs to the prompt, so that siblings have similar lengths. Lengths over `longest` are
    cut, so the mean of the drawn lengths may be smaller."""

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
    """Lengths measured in a run: `counts[i]` completions have `edges[i] <= n < edges[i + 1]` tokens. Within a bin all
    lengths are equally likely."""

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
    """Duration of an engine's step in seconds, by the number of sequences that it decodes (or prompts that it prefills)
    together. It is linear between the points and constant below the first. Beyond the last point it has the slope of
    the last two."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        batches = [batch for batch, _ in self.points]
        if not batches or batches != sorted(set(batches)) or batches[0] < 1:
            raise ConfigError(f"the batches of an engine's speed must increase from 1 or more; got {batches}")
        if min(seconds for _, seconds in self.points) <= 0:
            raise ConfigError("an engine's speed must be above 0 tokens/s at every batch")

    @classmethod
    def of_line(cls, fixed: float, each: float, most: int) -> Decode:
        """Return a line: a step takes `fixed + each * batch` seconds. It is known up to a batch of `most`."""
        most = max(2, most)
        return cls(((1, max(fixed + each, 1e-9)), (most, max(fixed + each * most, 1e-9))))

    @classmethod
    def of_rates(cls, rates: Sequence[tuple[int, float]]) -> Decode:
        """Args: rates: pairs of the number of sequences decoded together and the tokens/s of all of them."""
        if not all(0 < rate < math.inf for _, rate in rates):  # with NaN no simulation would end
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
    """Seconds in which an engine prefills and decodes nothing, by the number of prompts that come together. Then their
    sequences have their first tokens. None: prompts cost nothing, and first tokens are decoded like all others."""
    beside: float = 0.0
    """Share by which an engine's steps take longer while the learner trains: both use the same processors or memory."""
    prefill_s: float = 0.0
    """Seconds from an order until the first token of its group: for rendering and prefill."""
    deliver_s: float = 0.0
    """Seconds until a worker has the replay server's answer: to its request for groups, and to a group that it
    inserted. Only then is the place of that group free."""
    handle_s: float = 0.0
    """Seconds before that in which a worker handles the group. A worker handles one group at a time."""
    turns: int = 1
    """Number of turns in which a completion is sampled. After each the environment responds, or the reward is given."""
    environment_s: float = 0.0
    """Mean seconds of each of these responses."""
    environment_sigma: float = 0.0
    """Standard deviation of the logarithm of that time."""
    step_s: float = 0.0
    """Seconds of a train step, whatever its batch contains."""
    token_s: float = 0.0
    """Additional seconds per loss token of a step, for a single rank."""
    step_sigma: float = 0.0
    """Standard deviation of the logarithm of the time of a step."""
    sync_s: float = 0.0
    """Seconds from the publication of a version until all engines serve it."""
    stall_s: float = 0.0
    """Seconds that an engine pauses to load a version."""

    def slower(self, factor: float) -> Costs:
        """Return the costs with engines whose steps take `factor` times as long."""
        prompts = None if self.prompts is None else self.prompts.scaled(factor)
        return replace(self, decode=self.decode.scaled(factor), prompts=prompts)

    def train_s(self, tokens: float, ranks: int) -> float:
        """Return the mean duration of a train step in seconds."""
        return self.step_s + self.token_s * tokens / ranks
