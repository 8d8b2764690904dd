"""Does `asyncrl plan --from RUN RUN` foretell runs of a tiny model: throughput, idle shares, staleness?

    python -m benchmarks.plan_models [--steps 60] [--repeats 3] [--cases 7]

Whole runs of the quickstart's task, as a user starts them, on a machine that does nothing else: one core for the
rollout worker, one for the learner. In every repeat all settings are run, one after the other. The first two are those
that the costs are taken from, as `--from` does; the others are foretold with them. `held` were not run while this was
written. Per setting the median over the repeats, measured and foretold, and by how much they differ: tokens/s as a
share of the measured, idle as a share of the time, staleness in versions; `within` is of 10 %, 0.1 and 0.5.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.cli.plan import measured_costs, run_of
from asyncrl.planner.calibration import RunMeasured
from asyncrl.planner.costs import Costs
from asyncrl.planner.given import Given
from asyncrl.planner.outcome import simulate
from benchmarks.overlap import pin
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.quickstart import SMALL, run_quickstart
from benchmarks.plan import middle

WARM_UP = 0.1
OFF = {"tokens_per_s": 0.10, "learner_idle": 0.10, "rollout_idle": 0.10, "staleness_mean": 0.5}


@dataclass(frozen=True)
class Case:
    groups: int
    depth: int
    in_flight: int
    held: bool = False

    @property
    def name(self) -> str:
        known = f"groups={self.groups} depth={self.depth} in_flight={self.in_flight}"
        return f"held: {known}" if self.held else known

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"learner.groups_per_step={self.groups}",
            f"replay.pipeline_depth={self.depth}",
            f"rollout.max_in_flight={self.in_flight}",
            "replay.max_staleness=8",
        )


CALIBRATED = (Case(32, 1, 8), Case(16, 2, 32))
FORETOLD = (Case(32, 0, 16), Case(24, 1, 4), Case(32, 4, 64), Case(48, 2, 12, held=True), Case(16, 0, 6, held=True))
BASE = ("rollout.host=process", "eval.path=", "eval.every=0")


def run(given: argparse.Namespace, case: Case, folder: Path) -> RunMeasured:
    """Raises SystemExit: the run failed."""
    small = SMALL if given.smoke else ()
    run_quickstart(folder, (*small, *BASE, f"learner.steps={given.steps}", *case.settings), pin)
    return run_of(folder)


def compared(case: Case, seen: list[RunMeasured], costs: Costs, steps: int) -> dict[str, Any]:
    """Measured and foretold."""
    measured = middle([each.found() for each in seen])
    warm_up = max(1, round(WARM_UP * steps))
    runs = [simulate(seen[0].setup, costs, steps=steps, warm_up=warm_up, seed=seed) for seed in range(3)]
    foretold = middle(runs)
    off = {name: foretold[name] - measured[name] for name in OFF}
    off["tokens_per_s"] /= measured["tokens_per_s"]
    return {
        **{name: round(value, 3) for name, value in measured.items()},
        **{f"{name}_foretold": round(value, 3) for name, value in foretold.items()},
        **{f"{name}_off": round(value, 3) for name, value in off.items()},
        "within": all(abs(value) <= OFF[name] for name, value in off.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, default=7, help="that many of the settings, in their order")
    given = parse(parser, {"steps": 8, "repeats": 1, "cases": 1})
    cases = (*CALIBRATED, *FORETOLD)[: max(1, given.cases)]
    seen: dict[Case, list[RunMeasured]] = {case: [] for case in cases}
    folders: list[Path] = []
    with tempfile.TemporaryDirectory() as where:
        for repeat in range(given.repeats):
            for number, case in enumerate(cases):
                folder = Path(where) / f"{repeat}-{number}"
                seen[case].append(run(given, case, folder))
                folders += [folder] if case in CALIBRATED else []
        costs = measured_costs(folders, Given().costs(1, measured=True), Given())
    rows = {case.name: compared(case, seen[case], costs, given.steps) for case in cases}
    engine = {f"step_s_at_{batch}": round(costs.decode.step_s(batch), 5) for batch in (1, 32, 256)}
    engine |= {f"prompts_s_at_{batch}": round(costs.prompts.step_s(batch), 5) for batch in (1, 8) if costs.prompts}
    worker = {"handle_s": round(costs.handle_s, 5), "deliver_s": round(costs.deliver_s, 5)}
    learner = {"train_s": round(costs.step_s, 4), "train_us_per_token": round(costs.token_s * 1e6, 2)}
    answer("plan_models", {"steps": given.steps, **engine, **worker, **learner, **rows}, smoke=given.smoke)


if __name__ == "__main__":
    main()
