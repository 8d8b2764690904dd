"""How long does it take until the quickstart's held-out accuracy is 0.9, compared with TRL's `GRPOTrainer` on the same
machine?

    python -m benchmarks.trl [--seeds 0,1,2] [key=value ...]

TRL is installed once, into a virtual environment of its own beside the quickstart's models, with the versions of
constraints.txt. Both have the same base model, rows, reward, prompts and completions per step, temperature, learning
rate and its schedule, and AdamW; TRL has its own loss, and a single process with two threads. Ours runs as users start
it: learner and rollouts are processes of one thread each, and it evaluates while it trains; the time of TRL's
evaluations is left out of its times. The two run one after the other for each seed; ratios are medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.quickstart.prepare import cache_root, prepare, scratch_beside
from asyncrl.quickstart.recipes import WarmupRecipe
from benchmarks.parts.answer import ROOT, answer, parse
from benchmarks.parts.quickstart import ACCURACY, SMALL, run_quickstart

TRL = "trl==1.16.0"
STEPS, EVERY = 100, 10
"""Steps, and steps between evaluations, as in configs/experiment/quickstart.yaml."""
GOAL = 0.9


def python_with_trl() -> Path:
    """Return the Python of the virtual environment that has TRL. Makes the environment if it is missing."""
    folder = cache_root() / TRL
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            subprocess.run([sys.executable, "-m", "venv", made], check=True)
            pip = [made / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
            subprocess.run([*pip, TRL, "torch"], check=True, stdout=sys.stderr)
    return folder / "bin" / "python"


def ours(folder: Path, seed: int, overrides: list[str]) -> dict[str, float | None]:
    run = run_quickstart(folder / f"seed{seed}", [f"seed={seed}", f"eval.every={EVERY}", *overrides])
    first, last = run.rows[0]["time"], run.rows[-1]["time"]
    reached = next((row["time"] for row in run.evaluated() if row[ACCURACY] >= GOAL), None)
    return {
        "first_step_at_s": first - run.launched,
        "to_90_s": reached and reached - first,
        "steps_per_s": (len(run.rows) - 1) / (last - first),
        "final_accuracy": run.evaluated()[-1][ACCURACY],
    }


def theirs(python: Path, task: Path, seed: int, steps: int, every: int) -> dict[str, float | None]:
    launched = time.time()
    script = ROOT / "benchmarks" / "parts" / "trl_run.py"
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [python, script, task, str(steps), str(every), str(seed)],
        env=variables | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"TRL ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    times, accuracy = told["steps"], {int(step): value for step, value in told["accuracy"].items()}
    reached = next((times[step - 1] for step, value in accuracy.items() if value >= GOAL), None)
    return {
        "first_step_at_s": times[0] - launched,
        "to_90_s": reached and reached - times[0],
        "steps_per_s": (len(times) - 1) / (times[-1] - times[0]),
        "final_accuracy": accuracy[max(accuracy)],
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return ours ÷ TRL's, medians over the seeds; None where a run of either did not reach the goal."""
    found: dict[str, float | None] = {}
    for name in ("first_step_at_s", "to_90_s", "steps_per_s"):
        pairs = [(run["asyncrl"][name], run["trl"][name]) for run in runs]
        whole = all(value is not None for pair in pairs for value in pair)
        found[name] = round(statistics.median(mine / other for mine, other in pairs), 3) if whole else None
    return found


def rounded(row: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 3) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"seeds": "0"})
    overrides, steps, every = list(given.overrides), STEPS, EVERY
    if given.smoke:
        overrides, steps, every = [*SMALL, *overrides], 4, 2
    task, python, runs = prepare(WarmupRecipe()), python_with_trl(), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, given.seeds.split(",")):
            mine = rounded(ours(Path(folder), seed, overrides))
            runs.append({"seed": seed, "asyncrl": mine, "trl": rounded(theirs(python, task, seed, steps, every))})
    answer("trl", {"ours_over_trl": compared(runs), "runs": runs}, smoke=given.smoke)


if __name__ == "__main__":
    main()
