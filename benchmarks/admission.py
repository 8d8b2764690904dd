"""How much of what was generated does each stale policy and each admission window train: how much is wasted, and are
the long trajectories lost, or late?

    python -m benchmarks.admission [--steps 300] [--groups 16] [--size 8] [--max-staleness 4] [--pipeline-depth 2]

Runs the real core of the replay in virtual time. A train step takes 1 s, weights are served at once, and the members of
a group are decoded in parallel, so fast that a group takes 2.5 s on average. Lengths are log-normal; half of the
variance of their logarithm comes from the prompt, and no length exceeds 32 times the median; `sigma` is the standard
deviation of that logarithm.
Rows: `mask`, `drop`, `wait`; `window=W`, windowed FIFO with three windows: strictly in order, one batch, and the widest
that the staleness bound allows; `reuse=2`: `mask` with `replay.max_times_sampled=2`. Then the stale policies with
engines that decode at most the members of one batch at once while a quarter of a batch more waits in them, each also
with `replay.admission=sample` (`by sample`).

Columns for the groups admitted after the first tenth of the steps and before the last 30 steps: `waste`, share of the
generated tokens that no step trained; `length_bias`, mean length of the trajectories that were trained at least in part
over the mean length generated; `token_bias`, the same with each trajectory weighted by the share of it that was
trained; `longest_trained`, trained share of the tokens of the longest tenth of trajectories. For the whole run:
`early`, mean length of what the first 5 steps trained over the mean length generated; `idle`, share of the time that
the learner waited; `staleness_mean` and `staleness_max` of the trained tokens. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.types import NO_VERSION, Assignment, GroupHeader, StalePolicy, StepPlan, TrajectoryHeader
from benchmarks.parts.answer import answer, parse

TRAIN_S = 1.0
GROUP_S = 2.5
MEDIAN = 500
LONGEST = 32 * MEDIAN
WORKERS = 8
TAIL = 30
"""Steps at the end of a run. They are enough to decide the fate of every group admitted before them."""
EARLY = 5
SIGMAS = (0.5, 1.0, 1.5)


def draw_lengths(group_id: int, sigma: float, size: int) -> np.ndarray:
    """Draw the lengths of a group, [size] int64. A prompt gets the same lengths under every policy."""
    rng = np.random.default_rng([group_id, 20])
    logs = sigma * np.sqrt(0.5) * (rng.standard_normal() + rng.standard_normal(size))
    return np.clip(MEDIAN * np.exp(logs), 1, LONGEST).astype(np.int64)


@dataclass
class Made:
    """A group: its lengths, the number of tokens of each that were trained, and the steps done when it was admitted."""

    lengths: np.ndarray
    admitted: int
    trained: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.trained = np.zeros_like(self.lengths)


class World:
    """Workers and a learner around a replay core. The earliest of `events` happens next.

    Args:
        rows: members that all engines together decode at once; the others wait in them, first in first out. 0: no
            limit.
    """

    def __init__(self, settings: AdmissionSettings, sigma: float, rows: int = 0) -> None:
        self.settings, self.sigma = settings, sigma
        self.now = 0.0
        self.core = core = ReplayCore(settings, lambda: self.now, heartbeat_timeout_s=float("inf"))
        slowest = [draw_lengths(group, sigma, settings.group_size).max() for group in range(1000)]
        self.token_s = GROUP_S / float(np.mean(slowest))
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.groups: dict[int, Made] = {}
        self.published = [0.0]
        """Virtual time at which each version was published."""
        self.step = 0
        self.idle = 0.0
        self.free_since: float | None = 0.0
        self.ages: dict[int, int] = {}
        self.early: list[int] = []
        core.restore(step=None, policy_version=NO_VERSION, snapshot=None)
        core.publish(policy_version=0, parent=NO_VERSION)
        self.workers = [f"w{number}" for number in range(WORKERS)]
        self.rows = dict.fromkeys(self.workers, -(-rows // WORKERS) if rows else 1 << 30)
        """Free rows of each engine."""
        self.queues: dict[str, deque[Callable[[], None]]] = {worker: deque() for worker in self.workers}
        for worker in self.workers:
            core.hello(worker, worker, 0)

    def run(self, steps: int) -> None:
        while self.step < steps:
            self.ask()
            self.learn()
            self.now, _, happens = heapq.heappop(self.events)
            happens()

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), happens))

    def ask(self) -> None:
        slots = -(-self.settings.max_in_flight * self.settings.orders_per_group // WORKERS)
        while self.core.has_work():
            given = 0
            for worker in self.workers:
                held = len(self.core.run.workers.live[worker].held)
                orders = self.core.acquire(worker, worker, slots - held).assignments
                given += len(orders)
                for order in orders:
                    self.begin(worker, order)
            if not given:
                return

    def begin(self, worker: str, order: Assignment) -> None:
        size = self.settings.group_size
        lengths = draw_lengths(order.prompt_index, self.sigma, size)
        self.groups.setdefault(order.prompt_index, Made(lengths, self.step))
        if order.single:
            lengths = lengths[order.group_id % size :][:1]
        order_began: dict[int, float] = {}
        left = len(lengths)

        def start(member: int) -> None:
            order_began[member] = self.now
            self.later(self.token_s * float(lengths[member]), ended)

        def ended() -> None:
            nonlocal left
            left -= 1
            self.rows[worker] += 1
            if not left:
                self.finish(worker, order, lengths, order_began)
            self.decode(worker)

        self.queues[worker].extend(partial(start, member) for member in range(len(lengths)))
        self.decode(worker)

    def decode(self, worker: str) -> None:
        while self.rows[worker] and self.queues[worker]:
            self.rows[worker] -= 1
            self.queues[worker].popleft()()

    def finish(self, worker: str, order: Assignment, lengths: np.ndarray, began: dict[int, float]) -> None:
        members = tuple(
            TrajectoryHeader(
                length=1 + int(n), prompt_length=1, reward=0.0, version_tokens=self.runs(began[member], int(n))
            )
            for member, n in enumerate(lengths)
        )
        header = GroupHeader(
            group_id=order.group_id,
            prompt_index=order.prompt_index,
            attempt=order.attempt,
            worker=worker,
            trajectories=members,
            nbytes=1,
        )
        reply = self.core.insert(worker, worker, header, b"")
        assert reply.status == "accepted", reply

    def runs(self, began: float, length: int) -> tuple[tuple[int, int], ...]:
        """Return as (version, tokens) runs which versions sampled a trajectory of `length` tokens begun at `began`."""
        version = bisect_right(self.published, began) - 1
        result, done = [], 0
        while done < length:
            ends = (
                self.published[version + 1] if version + 1 < len(self.published) else self.now + self.token_s * length
            )
            until = min(length, int((ends - began) / self.token_s) + 1)
            if until > done:
                result.append((version, until - done))
                done = until
            version += 1
        return tuple(result)

    def learn(self) -> None:
        if self.free_since is None:
            self.core.lease(self.step + 1)  # sealed ahead, as the learner's prefetch does
            return
        plan = self.core.lease(self.step)
        if plan is None:
            return
        self.idle += self.now - self.free_since
        self.free_since = None
        self.later(TRAIN_S, lambda: self.trained(plan))

    def trained(self, plan: StepPlan) -> None:
        for group in plan.groups:
            made = self.groups[group.prompt_index]
            fresh = np.array([plan.fresh_tokens(member) for member in group.trajectories])
            made.trained = np.maximum(made.trained, fresh)
            self.early += made.lengths.tolist() if self.step < EARLY else []
        for age, tokens in plan.tokens_by_staleness().items():
            self.ages[age] = self.ages.get(age, 0) + tokens
        self.core.trained(step=self.step, policy_version=self.step + 1)
        self.published.append(self.now)
        self.step += 1
        self.free_since = self.now
        for worker in self.workers:
            self.core.served(worker, worker, self.step, "")

    def found(self) -> dict[str, float]:
        first, last = self.step // 10, self.step - min(TAIL, self.step // 3)
        cohort = [made for made in self.groups.values() if first <= made.admitted < last]
        lengths = np.concatenate([made.lengths for made in cohort])
        fresh = np.concatenate([made.trained for made in cohort])
        share = fresh / lengths
        long = lengths >= np.quantile(lengths, 0.9)
        tokens = sum(self.ages.values())
        figures = {
            "waste": 1 - fresh.sum() / lengths.sum(),
            "length_bias": lengths[fresh > 0].mean() / lengths.mean(),
            "token_bias": np.average(lengths, weights=share) / lengths.mean(),
            "longest_trained": fresh[long].sum() / lengths[long].sum(),
            "early": float(np.mean(self.early)) / lengths.mean(),
            "idle": self.idle / self.now,
            "staleness_mean": sum(age * tokens for age, tokens in self.ages.items()) / tokens,
            "staleness_max": max(self.ages),
        }
        return {name: round(float(value), 3) for name, value in figures.items()}


def policies(base: AdmissionSettings, widest: int) -> dict[str, AdmissionSettings]:
    windows = dict.fromkeys((1, min(widest, base.groups_per_step + 1), widest))
    return {
        "mask": base,
        "drop": replace(base, stale_policy=StalePolicy.DROP),
        "wait": replace(base, stale_policy=StalePolicy.WAIT),
        **{f"window={window}": replace(base, window=window) for window in windows},
        "reuse=2": replace(base, max_times_sampled=2),
    }


def both_ways(base: AdmissionSettings) -> dict[str, AdmissionSettings]:
    """Return the settings of each stale policy, with admission by group and by sample."""
    found = {}
    for policy in StalePolicy:
        given = replace(base, stale_policy=policy)
        found |= {policy.value: given, f"{policy.value}, by sample": replace(given, by_sample=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--pipeline-depth", type=int, default=2)
    options = parse(parser, {"steps": 12, "groups": 2, "size": 2})
    lead = (1 + options.pipeline_depth) * options.groups
    base = AdmissionSettings(
        groups_per_step=options.groups,
        group_size=options.size,
        max_staleness=options.max_staleness,
        pipeline_depth=options.pipeline_depth,
        max_in_flight=lead,
    )
    widest = (options.max_staleness - options.pipeline_depth) * options.groups + 1
    result: dict[str, object] = {"steps": options.steps, "groups": options.groups, "size": options.size}
    result |= {"max_staleness": options.max_staleness, "pipeline_depth": options.pipeline_depth}
    few, rows_of_all = (
        replace(base, max_in_flight=options.groups + -(-options.groups // 4)),
        options.groups * options.size,
    )
    for sigma in SIGMAS[:1] if options.smoke else SIGMAS:
        rows = {}
        free = {name: (settings, 0) for name, settings in policies(base, widest).items()}
        full = {f"{rows_of_all} rows, {name}": (settings, rows_of_all) for name, settings in both_ways(few).items()}
        for name, (settings, engines) in (free | full).items():
            world = World(settings, sigma, engines)
            world.run(options.steps)
            rows[name] = world.found()
        result[f"sigma={sigma}"] = rows
    answer("admission", result, smoke=options.smoke)


if __name__ == "__main__":
    main()
