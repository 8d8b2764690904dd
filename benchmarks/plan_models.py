"""How well does `asyncrl plan --from RUN RUN RUN` predict the throughput, idle shares and staleness of runs of a tiny
model?

    python -m benchmarks.plan_models [--steps 120] [--repeats 3] [--cases 11]

Whole runs of the quickstart's task, as a user starts them, on a machine that does nothing else. One core is for the
learner alone, as in a cluster; the other is for the rollout worker and the replay server, so that the server's work for
a group counts as part of the worker's. Every repeat runs all settings, one after the other. Three of them are
`calibrated`, the runs from which the costs are taken as `--from` does: one where learner and engine take turns, one
with few sequences and one with many. Each repeat is predicted with its own three, since a machine's speed drifts
between repeats. Settings marked `held` were not run while this was written. The answer has, for each setting, medians
over the repeats of the measured and the predicted (`foretold`) values and of their differences: tokens/s as a share of
the measured, idle as a share of the time, staleness in versions. `within`: the differences are at most 10 %, 0.1 and
0.5.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.cli.plan import measured_costs, run_of
from asyncrl.planner.calibration import RunMeasured
from asyncrl.planner.costs import Costs
from asyncrl.planner.given import Given
from asyncrl.planner.outcome import simulate
from benchmarks.overlap import CORES
from benchmarks.overlap import pin as pin_roles
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
        kind = "held: " if self.held else "calibrated: " if self in CALIBRATED else ""
        return kind + known

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"learner.groups_per_step={self.groups}",
            f"replay.pipeline_depth={self.depth}",
            f"rollout.max_in_flight={self.in_flight}",
            "replay.max_staleness=8",
        )


CALIBRATED = (Case(32, 0, 16), Case(32, 1, 8), Case(16, 2, 32))
CASES = (
    CALIBRATED[0],
    Case(24, 1, 4),
    Case(32, 4, 64),
    Case(36, 2, 18, held=True),
    Case(24, 3, 10),
    CALIBRATED[1],
    Case(40, 1, 20),
    Case(28, 2, 24),
    Case(20, 1, 6, held=True),
    Case(48, 1, 12),
    CALIBRATED[2],
)
"""The calibrated ones are at the beginning, in the middle and at the end, so that a drift is in all predictions."""
BASE = ("rollout.host=process", "eval.path=", "eval.every=0")


def run(given: argparse.Namespace, case: Case, folder: Path) -> RunMeasured:
    """Run `case` and read its measurements. Raises SystemExit: the run failed."""
    small = SMALL if given.smoke else ()
    run_quickstart(folder, (*small, *BASE, f"learner.steps={given.steps}", *case.settings), pin)
    return run_of(folder)


def pin(process: psutil.Process, command: str) -> None:
    """Pin the replay server to the worker's core too. Unpinned, it takes time from the learner while both cores are
    busy, and from nobody otherwise."""
    if "asyncrl.replay" in command and process.cpu_affinity() != CORES[:1]:
        process.cpu_affinity(CORES[:1])
    pin_roles(process, command)


@dataclass(frozen=True)
class Repeat:
    """One run of every setting."""

    steps: int
    seen: dict[Case, RunMeasured]
    costs: Costs
    """Costs measured in the calibrated runs."""

    def foretold(self, case: Case) -> dict[str, float]:
        warm_up, setup = max(1, round(WARM_UP * self.steps)), self.seen[case].setup
        return middle([simulate(setup, self.costs, steps=self.steps, warm_up=warm_up, seed=seed) for seed in range(3)])


def repeated(given: argparse.Namespace, cases: Sequence[Case], where: Path) -> Repeat:
    """Run all `cases` once. Raises SystemExit: a run failed."""
    folders = {case: where / str(number) for number, case in enumerate(cases)}
    seen = {case: run(given, case, folder) for case, folder in folders.items()}
    calibrated = [folders[case] for case in CALIBRATED if case in folders]
    return Repeat(given.steps, seen, measured_costs(calibrated, Given().costs(1, measured=True), Given()))


def compared(case: Case, repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Return the row of a setting: measured values, predictions and their differences."""
    measured = [middle([repeat.seen[case].found()]) for repeat in repeats]
    foretold = [repeat.foretold(case) for repeat in repeats]
    off = [{name: one[name] - other[name] for name in OFF} for one, other in zip(foretold, measured, strict=True)]
    for each, found in zip(off, measured, strict=True):
        each["tokens_per_s"] /= found["tokens_per_s"]
    row = {"": middle_of(measured), "_foretold": middle_of(foretold), "_off": middle_of(off)}
    return {
        **{f"{name}{kind}": round(value, 3) for kind, values in row.items() for name, value in values.items()},
        "tokens_per_s_off_each": " ".join(f"{each['tokens_per_s']:+.3f}" for each in off),
        "within": all(abs(row["_off"][name]) <= OFF[name] for name in OFF),
    }


def middle_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def told(costs: Costs) -> dict[str, float]:
    return {
        **{f"step_s_at_{batch}": costs.decode.step_s(batch) for batch in (1, 32, 256)},
        **{f"prompts_s_at_{batch}": costs.prompts.step_s(batch) for batch in (1, 8) if costs.prompts},
        **{"handle_s": costs.handle_s, "deliver_s": costs.deliver_s},
        **{"train_s": costs.step_s, "train_us_per_token": costs.token_s * 1e6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="that many of the settings, in their order")
    given = parse(parser, {"steps": 8, "repeats": 1, "cases": 1})
    cases = CASES[: max(1, given.cases)]
    with tempfile.TemporaryDirectory() as where:
        repeats = [repeated(given, cases, Path(where) / str(repeat)) for repeat in range(given.repeats)]
    costs = {name: round(value, 5) for name, value in middle_of([told(repeat.costs) for repeat in repeats]).items()}
    rows = {case.name: compared(case, repeats) for case in cases}
    answer("plan_models", {"steps": given.steps, **costs, **rows}, smoke=given.smoke)


if __name__ == "__main__":
    main()
