"""Costs of a run that was measured: read from its metrics, and for the engines' speed found by simulating that run
until as many tokens are sampled per second in which engines had work."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.errors import RunFolderError
from asyncrl.pace import KINDS, Pace
from asyncrl.planner.costs import Costs, Decode, Histogram
from asyncrl.planner.outcome import Measured
from asyncrl.planner.simulation import Setup, Simulation
from asyncrl.storage.lines import row_of

SKIPPED, FEWEST = 0.1, 4
"""Share of the steps that are warm-up, and the steps that have to be left."""
STOPPED, STOPPED_S = 10, 5.0
"""A step of so many times the usual length, and of so many seconds at least, is one in which the run stood still."""
LENGTHS = "histogram/completion/length"
BINS = 400
ROUNDS, CLOSE = 4, 0.01
DELIVERED, HANDLED = 0.2, 0.01
"""Of the time in which a mean completion is decoded: where the search for `deliver_s` and `handle_s` begins. From much
less than they are the search would not find that they matter."""
APART = 0.3
"""Between the least and the greatest share of their steps that engines of different runs made beside a training
learner: from there on they tell how much it slows them."""
MOST_BESIDE, BESIDE_STEPS = 1.0, 101
"""The largest `Costs.beside` that is tried, and how many are."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasured:
    """What is known of a run that was measured."""

    setup: Setup
    rows: Sequence[Row]
    """Of its metrics, one per step, the warm-up left out, and the steps in which it stood still."""
    pairs: Sequence[tuple[Row, Row]]
    """Steps that follow each other, likewise: between them sums grew."""
    lengths: Histogram

    @property
    def seconds(self) -> float:
        return sum(row["time/step"] for row in self.rows)

    @property
    def generated_per_busy_s(self) -> float:
        """Tokens of one engine in a second in which its worker had a group."""
        tokens, busy = self.grown("goodput/generated_tokens"), self.grown("idle/rollout_busy_s")
        return max(tokens, 1.0) / max(busy, 1e-3)  # heartbeats bring both: of a run of a few seconds there may be none

    def grown(self, name: str) -> float:
        """By how much a sum grew over the rows."""
        return sum(growth(before, now, name) for before, now in self.pairs)

    @property
    def beside(self) -> float:
        """Share of the time in which workers had groups that the learner was busy too, at least."""
        found = self.found()
        return max(0.0, 1 - found.learner_idle - found.rollout_idle) / max(1 - found.rollout_idle, 1e-9)

    def pace(self, kind: str) -> Pace:
        """Of its engines' steps; without any where they told nothing of them."""
        pairs = [(Pace.of(before, f"engine/{kind}"), Pace.of(now, f"engine/{kind}")) for before, now in self.pairs]
        return sum((now if now.steps < before.steps else now - before for before, now in pairs), Pace())

    def found(self) -> Measured:
        """In the terms of a simulation's outcome."""
        seconds = self.seconds
        busy, idle = self.grown("idle/rollout_busy_s"), self.grown("idle/rollout_s")
        tokens = [row["perf/trained_tokens_per_s"] * row["time/step"] for row in self.rows]
        ages = sum(row["staleness/mean"] * count for row, count in zip(self.rows, tokens, strict=True))
        return Measured(
            tokens_per_s=sum(tokens) / seconds,
            step_s=seconds / len(self.rows),
            learner_idle=sum(row["time/wait_batch"] for row in self.rows) / seconds,
            rollout_idle=idle / max(busy + idle, 1e-9),
            staleness_mean=ages / max(sum(tokens), 1e-9),
        )


def read_run(folder: Path, setup: Setup, rows: Sequence[Row]) -> RunMeasured:
    """Args:
        rows: of its `metrics.jsonl`.

    Raises:
        RunFolderError: it has too few steps, or no histograms.
    """
    steps = [row for row in rows if "time/wait_batch" in row and "idle/rollout_busy_s" in row]
    steps = steps[max(1, math.ceil(SKIPPED * len(steps))) :]
    limit = max(STOPPED_S, STOPPED * statistics.median(row["time/step"] for row in steps)) if steps else STOPPED_S
    pairs = [pair for pair in itertools.pairwise(steps) if not stood_still(*pair, limit, setup.engines)]
    steps = [row for row in steps if row["time/step"] <= limit]
    if len(steps) < FEWEST:
        raise RunFolderError(
            f"{folder} has {len(steps)} steps after its warm-up, but costs are measured over at least {FEWEST}. Let "
            "it train longer, or give costs by hand (cost.NAME=...)"
        )
    return RunMeasured(setup=setup, rows=steps, pairs=pairs, lengths=lengths_of(folder))


def stood_still(before: Row, now: Row, limit: float, engines: int) -> bool:
    """Whether the step between them, or the engines in it, took more than `limit` seconds: stopped by a signal, say.
    How long engines were busy comes with heartbeats, perhaps one step later."""
    return now["time/step"] > limit or growth(before, now, "idle/rollout_busy_s") > engines * limit


def growth(before: Row, now: Row, name: str) -> float:
    """Of a sum. A replay server that was started again counts from 0."""
    return now[name] if now[name] < before[name] else now[name] - before[name]


def lengths_of(folder: Path) -> Histogram:
    """Of all completions that were trained. Raises RunFolderError where there are no histograms."""
    file = folder / "histograms.jsonl"
    counts: dict[int, float] = {}
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        found = (row_of(line) or {}).get(LENGTHS)  # the last line may be torn: the run was killed, or goes on
        if found:
            for (low, high), count in zip(itertools.pairwise(found["edges"]), found["counts"], strict=True):
                whole = range(max(1, math.ceil(low)), max(1, math.ceil(low)) + 1)
                if math.floor(high) > math.ceil(low):
                    whole = range(max(1, math.ceil(low)), math.floor(high) + 1)
                for length in whole if count else ():
                    counts[length] = counts.get(length, 0.0) + count / len(whole)
    if not counts:
        raise RunFolderError(
            f"{folder} has no lengths in histograms.jsonl, so it was made by an older version. Train it again"
        )
    wide = max(1, math.ceil((max(counts) - min(counts) + 1) / BINS))
    edges = list(range(min(counts), max(counts) + wide + 1, wide))
    bins = [0.0] * (len(edges) - 1)
    for length, count in counts.items():
        bins[(length - edges[0]) // wide] += count
    return Histogram(tuple(map(float, edges)), tuple(bins))


def calibrate(runs: Sequence[RunMeasured], given: Costs, *, steps: int = 40) -> Costs:
    """The costs of these runs of one workload.

    How long engines' steps take is fitted to what they told of them, and what a worker does with a finished group is
    then what makes simulations of the runs as fast as the runs. Where engines told nothing (a server's, an older run),
    their steps are fitted to the throughput: of several runs, with other numbers of sequences decoded together, the
    slope is found too; of one a step takes as long at every batch. A speed that is given keeps its shape.

    Args:
        given: what no run tells (environment, turns), and the engines' speed if it has more than one point.
    """
    rows = [row for run in runs for row in run.rows]
    costs = replace(
        given,
        lengths=runs[0].lengths,
        sync_s=median_of(rows, "weights/update_s"),
        stall_s=median_of(rows, "weights/stall_s"),
        **train_costs(runs),
    )
    if len(given.decode.points) == 1:
        if engines_told(runs):
            costs = fit_host(runs, with_paces(costs, runs), steps)
        elif len(runs) > 1:
            costs = fit_slope(runs, costs, steps)
    for _ in range(ROUNDS):
        missed = statistics.mean(errors(runs, costs, steps))
        if abs(missed) < CLOSE:
            break
        costs = costs.slower(math.exp(missed))
    return costs


def engines_told(runs: Sequence[RunMeasured]) -> bool:
    return pace_of(runs, "decode").s > 0  # some count their steps and do not time them


def pace_of(runs: Sequence[RunMeasured], kind: str) -> Pace:
    """Of the engines of all of them."""
    return sum((run.pace(kind) for run in runs), Pace())


def with_paces(costs: Costs, runs: Sequence[RunMeasured]) -> Costs:
    """`decode`, `prompts` and `beside` by what the engines told: least squares over all their steps."""
    shares = [run.beside for run in runs]
    paces = {kind: [run.pace(kind) for run in runs] for kind in KINDS}
    apart = max(shares) - min(shares) >= APART

    def together(kind: str, beside: float) -> Pace:
        slowed = (pace.slowed(1 + beside * share) for pace, share in zip(paces[kind], shares, strict=True))
        return sum(slowed, Pace())

    tried = np.linspace(0.0, MOST_BESIDE, BESIDE_STEPS).tolist() if apart else [0.0]
    beside = max(tried, key=lambda each: together("decode", each).explained())
    decoded, prefilled = (together(kind, beside).line() for kind in KINDS)
    most = max(run.setup.max_sequences for run in runs)
    prompts = Decode.of_line(*prefilled, most) if any(prefilled) else None
    return replace(costs, decode=Decode.of_line(*decoded, most), prompts=prompts, beside=beside)


def fit_host(runs: Sequence[RunMeasured], costs: Costs, steps: int) -> Costs:
    """`deliver_s` and `handle_s`, but for what is given."""
    if costs.deliver_s:
        return costs
    decoded = pace_of(runs, "decode")
    made = costs.lengths.mean * decoded.s / decoded.steps
    guess = DELIVERED * made, HANDLED * made
    return fitted(runs, steps, guess, lambda both: replace(costs, deliver_s=both[0], handle_s=both[1]))


def fit_slope(runs: Sequence[RunMeasured], costs: Costs, steps: int) -> Costs:
    """Both parts of a decode step, `fixed + each * b`."""
    most = max(run.setup.max_sequences for run in runs)
    guess = 1 / max(run.generated_per_busy_s for run in runs)
    return fitted(
        runs, steps, (guess * 4, guess / 2), lambda both: replace(costs, decode=Decode.of_line(both[0], both[1], most))
    )


def fitted(
    runs: Sequence[RunMeasured], steps: int, guess: tuple[float, float], at: Callable[[list[float]], Costs]
) -> Costs:
    """Gauss-Newton in the logarithms of two seconds: least squares of `errors`."""
    logs = np.log(guess)

    def missed(point: np.ndarray) -> np.ndarray:
        return np.array(errors(runs, at(np.exp(point).tolist()), steps))

    for _ in range(ROUNDS):
        here = missed(logs)
        slopes = np.stack([(missed(logs + 0.1 * unit) - here) / 0.1 for unit in np.eye(2)], axis=1)
        # The ridge keeps what the runs do not tell apart where it is.
        move = np.linalg.solve(slopes.T @ slopes + 1e-3 * np.eye(2), -slopes.T @ here)
        logs = logs + np.clip(move, -1.5, 1.5)
    return at(np.exp(logs).tolist())


def errors(runs: Sequence[RunMeasured], costs: Costs, steps: int) -> list[float]:
    """Logarithm of the tokens per busy second, simulated over measured."""
    return [math.log(rate_of(run, costs, steps) / run.generated_per_busy_s) for run in runs]


def rate_of(run: RunMeasured, costs: Costs, steps: int) -> float:
    """`generated_per_busy_s` of a simulation of the run."""
    simulation = Simulation(run.setup, costs)
    simulation.run(5)
    tokens, held = simulation.generated, simulation.held_s
    simulation.run(steps)
    return (simulation.generated - tokens) / max(simulation.held_s - held, 1e-12)


def train_costs(runs: Sequence[RunMeasured]) -> dict[str, float]:
    """`step_s`, `token_s`, `step_sigma`: least squares over the steps, neither part below 0.

    The slope is that of the training alone. What else is in a step (publishing, logging) takes as long whatever the
    batch, but differs between runs that load the machine differently: a slope through it would mistake that for tokens.
    """
    trained, seconds, tokens = [], [], []
    for run in runs:
        for row in run.rows:
            seconds.append(row["time/step"] - row["time/wait_batch"] - row.get("weights/wait_previous_s", 0.0))
            trained.append(row.get("time/train", seconds[-1]))
            tokens.append(row["perf/trained_tokens_per_s"] * row["time/step"] / run.setup.ranks)
    y, x = np.array(seconds), np.array(tokens)
    slope = float(np.cov(x, np.array(trained), ddof=0)[0, 1] / x.var()) if x.std() > 0.02 * x.mean() else 0.0
    slope = min(max(slope, 0.0), float(y.mean() / x.mean()))
    fixed = float(y.mean() - slope * x.mean())
    left = np.log(np.maximum(y, 1e-6) / np.maximum(fixed + slope * x, 1e-6))
    return {"step_s": fixed, "token_s": slope, "step_sigma": float(np.clip(left.std(), 0.0, 1.0))}


def median_of(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(statistics.median(values)) if values else 0.0
