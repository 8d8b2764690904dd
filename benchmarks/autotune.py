"""How close does `rollout.autotune` come to the best fixed setting, from a bad start?

    python -m benchmarks.autotune [--workloads 200] [--steps 250] [--real]

Random workloads (engines, lengths, how a batch slows an engine down, speed of the learner relative to the engines,
weight updates, environments) run in the planner's virtual time. For each workload the best fixed setting is searched
for. The candidates are all depths with all groups in flight, and the best depth with a half and a quarter of them; the
best is the least stale of those within 1 % of the fastest. The search uses other completions than the comparison:
otherwise the fastest of a dozen would partly be the one with lucky completions.
Then the workload is tuned, once from depth 0 and once from the deepest. Tuned and fixed setting have the same
completions, and both are measured from step 50 on. `good`: at least 95 % of the tokens/s of the fixed setting, at a
mean staleness of at most 1.05 times that of the fixed setting + 0.25.

`--real`: also three real runs of the replay server and the workers' loops, whose engines and learner sleep (see
`benchmarks.plan`), each beside a real run of the fixed setting that is best in simulation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.planner.costs import Costs, Decode, LogNormal
from asyncrl.planner.outcome import Measured, Outcome, outcome_of, simulate
from asyncrl.planner.simulation import Setup, Simulation
from asyncrl.replay.core.admission import AdmissionSettings
from benchmarks import plan
from benchmarks.parts.answer import answer, parse

FAST, LEAN, FRESH, WARM_UP = 0.95, 1.05, 0.25, 50
NEAR_BEST = 0.99
SEARCHED = 100_000
"""Offset added to the seed for the search."""


@dataclass(frozen=True)
class Workload:
    setup: Setup
    costs: Costs

    @classmethod
    def drawn(cls, seed: int) -> Workload:
        random = np.random.default_rng([seed, 77])
        groups, members = int(random.choice([4, 8, 16, 24])), int(random.choice([2, 4, 8]))
        bound, engines = int(random.choice([4, 8, 12, 16])), int(random.choice([1, 2, 4, 8]))
        sequences, mean = int(random.choice([16, 64, 256])), float(random.choice([100, 400, 1000]))
        lengths = LogNormal(mean, float(random.uniform(0.1, 1.0)), int(mean * 16), float(random.uniform(0, 0.8)))
        alone, knee = 0.02, float(np.exp(random.uniform(np.log(2), np.log(256))))
        decode = Decode(((1, alone), (2, alone + alone / knee)))
        if not random.integers(2):
            decode = Decode(((max(2, int(knee)), alone), (2 * max(2, int(knee)), 2 * alone)))
        in_flight = int(groups * random.choice([1, 2, 4, 1 + bound]))
        slots = max(1, min(-(-in_flight // engines), -(-sequences // members) * 5 // 4 + 1))
        batch = min(sequences, slots * members, max(1, in_flight * members // engines))
        step_s = groups * members * mean * decode.step_s(batch) / engines / batch
        train_s = step_s * float(np.exp(random.uniform(np.log(0.3), np.log(3))))
        costs = Costs(
            decode=decode,
            lengths=lengths,
            prefill_s=0.05,
            deliver_s=0.02,
            turns=int(random.choice([1, 1, 3])),
            environment_s=float(random.choice([0, 0, 0.3])) * step_s,
            environment_sigma=0.5,
            step_s=train_s * 0.3,
            token_s=train_s * 0.7 / (groups * members * mean),
            step_sigma=0.1,
            sync_s=float(random.uniform(0, 0.5)) * train_s,
            stall_s=0.02 * train_s,
        )
        settings = AdmissionSettings(
            groups_per_step=groups,
            group_size=members,
            max_staleness=bound,
            pipeline_depth=0,
            max_in_flight=in_flight,
        )
        return cls(Setup(settings=settings, engines=engines, slots=slots, max_sequences=sequences, ranks=1), costs)

    def at(self, depth: int, in_flight: int, seed: int, steps: int = 150) -> tuple[Outcome, int, int]:
        setup = with_bounds(self.setup, pipeline_depth=depth, max_in_flight=in_flight)
        return simulate(setup, self.costs, steps=steps, warm_up=WARM_UP, seed=seed), depth, in_flight

    def best(self, steps: int, seed: int) -> Outcome:
        """Return the outcome of the best fixed setting."""
        _, depth, in_flight = self.searched(SEARCHED + seed)
        return self.at(depth, in_flight, seed, steps)[0]

    def searched(self, seed: int) -> tuple[Outcome, int, int]:
        settings = self.setup.settings
        most = settings.max_in_flight
        tried = [
            self.at(depth, most, seed) for depth in (0, 1, 2, 3, 4, 6, 8, 12, 16) if depth <= settings.max_staleness
        ]
        depth = least_stale(tried)[1]
        return least_stale([*tried, *(self.at(depth, part, seed) for part in {max(1, most // 2), max(1, most // 4)})])

    def tuned(self, depth: int, steps: int, seed: int) -> tuple[Outcome, int]:
        """Return the outcome of a tuned run that starts at `depth`, and the number of moves of the tuner."""
        most = self.setup.settings.max_in_flight
        simulation = Simulation(with_bounds(self.setup, pipeline_depth=depth, most_in_flight=most), self.costs, seed)
        simulation.run(WARM_UP)
        before = simulation.held_s, simulation.now
        simulation.run(steps)
        bounds = [(step.pipeline_depth, step.max_in_flight) for step in simulation.steps]
        moves = sum(one != other for one, other in itertools.pairwise(bounds))
        return outcome_of(simulation, WARM_UP, before), moves


def with_bounds(setup: Setup, **bounds: int) -> Setup:
    return replace(setup, settings=replace(setup.settings, **bounds))


def least_stale(tried: list[tuple[Outcome, int, int]]) -> tuple[Outcome, int, int]:
    most = max(found.tokens_per_s for found, *_ in tried)
    return min(
        (each for each in tried if each[0].tokens_per_s >= NEAR_BEST * most), key=lambda it: it[0].staleness_mean
    )


def compared(found: Measured, best: Measured) -> dict[str, float]:
    return {
        "tokens_per_s": round(found.tokens_per_s / best.tokens_per_s, 3),
        "staleness": round(found.staleness_mean, 2),
        "staleness_best": round(best.staleness_mean, 2),
        "good": found.tokens_per_s >= FAST * best.tokens_per_s
        and found.staleness_mean <= LEAN * best.staleness_mean + FRESH,
    }


def simulated(seed: int, steps: int) -> list[dict[str, float]]:
    workload = Workload.drawn(seed)
    best = workload.best(steps, seed)
    rows = []
    for depth in (0, workload.setup.settings.max_staleness):
        found, moves = workload.tuned(depth, steps, seed)
        rows.append({"seed": seed, "from": depth, "moves": moves, **compared(found, best)})
    return rows


REAL = {
    "engines are slower": plan.Case(2, 0, 32, autotune=True),
    "learner is slower": plan.Case(3, 8, 32, slower=2.0, autotune=True),
    "about as fast": plan.Case(2, 8, 32, slower=1.6, autotune=True),
}
DEPTHS, PARTS = (0, 1, 2, 3, 4, 6, 8), (4, 6, 8, 12, 16, 24, 32)


def best_case(case: plan.Case) -> plan.Case:
    """Return the best fixed setting in simulation."""
    tried = []
    for depth in DEPTHS:
        for in_flight in PARTS:
            fixed = replace(case, depth=depth, in_flight=in_flight, autotune=False)
            setup = replace(fixed.setup, slots=case.setup.slots)
            found = simulate(setup, plan.true_costs(case), steps=80, warm_up=20)
            tried.append((found, depth, in_flight))
    _, depth, in_flight = least_stale(tried)
    return replace(case, depth=depth, in_flight=in_flight, autotune=False)


def real(case: plan.Case, steps: int, folder: Path) -> tuple[Measured, dict[str, Any]]:
    """Run `case` for real. Return what was measured from step 50 on, and the last row."""
    rows = plan.run(case, steps, folder)
    found = plan.read_run(folder, case.setup, rows)
    return replace(found, rows=rows[min(WARM_UP, steps // 2) :]).found(), rows[-1]


def real_runs(steps: int) -> dict[str, Any]:
    said = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(REAL)) as threads:
        for name, (tuned, fixed) in {
            name: (
                threads.submit(real, case, steps, Path(folder) / f"{number}-tuned"),
                threads.submit(real, best_case(case), steps, Path(folder) / f"{number}-fixed"),
            )
            for number, (name, case) in enumerate(REAL.items())
        }.items():
            (found, last), (best, _) = tuned.result(), fixed.result()
            ends = {each: last[f"autotune/{each}"] for each in ("pipeline_depth", "max_in_flight", "moves")}
            said[f"real: {name}"] = {
                "from": REAL[name].depth,
                "fixed": best_case(REAL[name]).name,
                **ends,
                **compared(found, best),
            }
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--real", action="store_true")
    given = parse(parser, {"workloads": 1, "steps": 80})
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as processes:
        found = processes.map(simulated, range(given.workloads), [given.steps] * given.workloads)
        rows = [row for both in found for row in both]
    bad = [
        {name: row[name] for name in ("seed", "from", "tokens_per_s", "staleness", "staleness_best")}
        for row in rows
        if not row["good"]
    ]
    result = {
        "runs": len(rows),
        "good": sum(bool(row["good"]) for row in rows),
        "tokens_per_s_median": statistics.median(row["tokens_per_s"] for row in rows),
        "tokens_per_s_least": min(row["tokens_per_s"] for row in rows),
        "staleness_median_of_best": round(
            statistics.median(row["staleness"] / max(row["staleness_best"], 0.01) for row in rows), 3
        ),
        "moves_median": statistics.median(row["moves"] for row in rows),
        "not_good": [" ".join(f"{name}={value}" for name, value in row.items()) for row in bad],
    }
    answer("autotune", result | (real_runs(given.steps // 2) if given.real else {}), smoke=given.smoke)


if __name__ == "__main__":
    main()
