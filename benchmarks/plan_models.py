"""How well does `asyncrl plan --from RUN RUN RUN` predict the throughput, idle shares and staleness of runs of a tiny
model?

    python -m benchmarks.plan_models [--steps 60] [--repeats 3] [--cases 8]
    python -m benchmarks.plan_models --quickstart [--steps 120] [--cases 11]

Whole runs as a user starts them, on a machine that does nothing else, of a model of 1 M parameters with random
weights: completions of 1 to 48 tokens, 15 on average. With `--quickstart` of the quickstart's task: 149 k parameters,
completions of 6 tokens, where Python needs as much of the processor as the model does.

One core is for the rollout worker alone, as in a cluster; all other processes are on the other, where they take time
from the learner in proportion to what it trains. Run folders lie in memory where there is a file system in it: replies
of the replay server wait for the disk, and a shared one takes now 5 ms and now 50.

Every repeat runs all settings, one after the other. Some of them are `calibrated`, the runs from which the costs are
taken as `--from` does: five with few and many sequences, in one of which learner and engine take turns; three of the
quickstart's. Each repeat is predicted with its own, since a machine's speed drifts between repeats. Settings marked
`held` were not run while this was written. The answer has, for each setting, medians over the repeats of the measured
and the predicted (`foretold`) values and of their differences: tokens/s as a share of the measured, idle as a share of
the time, staleness in versions. `within`: the differences are at most 10 %, 0.1 and 0.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.cli.plan import measured_costs, run_of
from asyncrl.planner.calibration import RunMeasured
from asyncrl.planner.costs import Costs
from asyncrl.planner.given import Given
from asyncrl.planner.outcome import simulate
from asyncrl.quickstart.byte_tokenizer import EOS_ID
from benchmarks.overlap import CORES
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.model import tiny_task
from benchmarks.parts.quickstart import SMALL, run_quickstart
from benchmarks.plan import middle

WARM_UP = 0.1
OFF = {"tokens_per_s": 0.10, "learner_idle": 0.10, "rollout_idle": 0.10, "staleness_mean": 0.5}


@dataclass(frozen=True)
class Case:
    groups: int
    depth: int
    in_flight: int
    kind: str = ""
    """`calibrated`, `held`, or neither."""

    @property
    def name(self) -> str:
        known = f"groups={self.groups} depth={self.depth} in_flight={self.in_flight}"
        return f"{self.kind}: {known}" if self.kind else known

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"learner.groups_per_step={self.groups}",
            f"replay.pipeline_depth={self.depth}",
            f"rollout.max_in_flight={self.in_flight}",
            "replay.max_staleness=8",
        )


CASES = (
    Case(16, 0, 16, "calibrated"),
    Case(22, 2, 9, "held"),
    Case(12, 1, 6, "calibrated"),
    Case(24, 1, 20, "calibrated"),
    Case(12, 2, 24),
    Case(16, 1, 8, "calibrated"),
    Case(10, 1, 14, "held"),
    Case(16, 4, 32, "calibrated"),
)
"""The calibrated ones are spread over a repeat, so that a drift is in all predictions."""
QUICKSTART = (
    Case(32, 0, 16, "calibrated"),
    Case(24, 1, 4),
    Case(32, 4, 64),
    Case(36, 2, 18, "held"),
    Case(24, 3, 10),
    Case(32, 1, 8, "calibrated"),
    Case(40, 1, 20),
    Case(28, 2, 24),
    Case(20, 1, 6, "held"),
    Case(48, 1, 12),
    Case(16, 2, 32, "calibrated"),
)
BASE = ("rollout.host=process", "eval.path=", "eval.every=0")
MEMORY = Path("/dev/shm")
FIRST = -15
"""Niceness of the replay server."""
ENDINGS = range(97, 113)
"""Tokens that end a completion besides the model's own, so that lengths vary: a random model samples each alike."""


def larger_task(folder: Path) -> list[str]:
    """Write a model of 1 M parameters with random weights and rows for it. Returns the settings that name them."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 1}
    settings = tiny_task(folder, **sizes)
    generation = folder / "model" / "generation_config.json"
    known = json.loads(generation.read_text())
    generation.write_text(json.dumps(known | {"eos_token_id": [EOS_ID, *ENDINGS]}))
    # Without a rate the weights stay, and with them the lengths.
    return [*settings, "rollout.max_new_tokens=48", "learner.lr=1e-9"]


@dataclass(frozen=True)
class Runs:
    """What all runs share."""

    steps: int
    settings: tuple[str, ...]
    smoke: bool

    def run(self, case: Case, folder: Path) -> RunMeasured:
        """Run `case` and read its measurements. Raises SystemExit: the run failed."""
        small = SMALL if self.smoke else ()
        settings = (*small, *BASE, *self.settings, f"learner.steps={self.steps}", *case.settings)
        run_quickstart(folder, settings, pin)
        return run_of(folder)


def pin(process: psutil.Process, command: str) -> None:
    """Pin the worker to the first core and everything else of the run to the last. There the replay server goes before
    the learner if this user may say so: in a cluster it answers at once, whether the learner computes or not."""
    if "asyncrl" not in command:
        return
    cores = CORES[:1] if "asyncrl.rollout" in command else CORES[-1:]
    if process.cpu_affinity() != cores:
        process.cpu_affinity(cores)
    if "asyncrl.replay" in command and process.nice() != FIRST:
        with suppress(psutil.AccessDenied):
            process.nice(FIRST)


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


def repeated(runs: Runs, cases: Sequence[Case], where: Path) -> Repeat:
    """Run all `cases` once. Raises SystemExit: a run failed."""
    folders = {case: where / str(number) for number, case in enumerate(cases)}
    seen = {case: runs.run(case, folder) for case, folder in folders.items()}
    calibrated = [folder for case, folder in folders.items() if case.kind == "calibrated"]
    return Repeat(runs.steps, seen, measured_costs(calibrated, Given().costs(1, measured=True), Given()))


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
        **{"beside": costs.beside, "handle_s": costs.handle_s, "deliver_s": costs.deliver_s},
        **{"train_s": costs.step_s, "train_us_per_token": costs.token_s * 1e6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quickstart", action="store_true", help="the quickstart's task and model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, default=99, help="that many of the settings, in their order")
    given = parse(parser, {"steps": 8, "repeats": 1, "cases": 1})
    cases = (QUICKSTART if given.quickstart else CASES)[: max(1, given.cases)]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as where:
        settings = () if given.quickstart else larger_task(Path(where))
        runs = Runs(given.steps, tuple(settings), given.smoke)
        repeats = [repeated(runs, cases, Path(where) / str(repeat)) for repeat in range(given.repeats)]
    costs = {name: round(value, 5) for name, value in middle_of([told(repeat.costs) for repeat in repeats]).items()}
    rows = {case.name: compared(case, repeats) for case in cases}
    answer("plan_models", {"steps": given.steps, **costs, **rows}, smoke=given.smoke)


if __name__ == "__main__":
    main()
