"""Does a pretrained chat model learn from data that is some versions old as it does from fresh data? Held-out accuracy
of SmolLM2-135M-Instruct before and after, asynchronous beside synchronous, with 95 % intervals.

    python -m benchmarks.pretrained [--folder runs/pretrained] [--steps 40] [--only async|sync] [key=value ...]

The task is sums of two numbers from 1 to 20 (`What is 7 + 12?`), rewarded if the last number of the answer, of at most
12 tokens, is right. A quarter of the pairs is held out. Both runs train as many sequences per step for as many steps,
with the default loss; the synchronous one samples every token by the weights that train on it. Held-out questions are
answered at temperature 1, as in training, and greedily. The model is downloaded once (`parts/pretrained.py`).

Runs are checkpointed. A stopped benchmark goes on where it was, and finished runs in `--folder` are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.telemetry.metrics.evaluations import by_step, is_evaluation
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.pretrained import MissingModelError, pretrained_model

LARGEST = 20
RUNS = {"async": ("replay=async",), "sync": ("replay=sync",)}
SETS = {"sampled": 1.0, "greedy": 0.0}
"""Sets of held-out questions -> temperature at which they are answered."""
TASK = (
    *("rollout=process", "reward=gsm8k", "reward.args.method=numeric", "reward.metric=accuracy"),
    *("data.max_prompt_tokens=64", "rollout.max_new_tokens=12", "rollout.group_size=8", "learner.groups_per_step=8"),
    *("learner.max_tokens_per_microbatch=1024", "learner.lr=2e-5", "learner.warmup_steps=2", "learner.save_every=4"),
)
SMOKE = ("rollout.group_size=2", "learner.groups_per_step=2", "eval.rows=4")


def rows(*, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the sums that are held out, or else the others."""
    for first in range(1, LARGEST + 1):
        for second in range(1, LARGEST + 1):
            question = f"What is {first} + {second}?"
            pair = f"{min(first, second)}+{max(first, second)}"  # 7 + 12 must not be trained where 12 + 7 is held out
            if (zlib.crc32(pair.encode()) % 4 == 0) == held_out:
                yield {"prompt": [{"role": "user", "content": question}], "answer": str(first + second)}


def write(folder: Path) -> list[str]:
    """Write the task to `folder`. Returns the settings that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("heldout", True)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(held_out=held_out)))
    evaluated = [
        setting
        for name, temperature in SETS.items()
        for setting in (
            f"eval.sets.{name}.path={folder / 'heldout.jsonl'}",
            f"eval.sets.{name}.temperature={temperature}",
        )
    ]
    return [f"data.path={folder / 'train.jsonl'}", *evaluated]


def measured(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the run's metrics, one per step; empty before the first."""
    file = run_dir / "metrics.jsonl"
    return [dict(row) for row in by_step(map(json.loads, file.read_text().splitlines()))] if file.exists() else []


def finished(found: list[dict[str, Any]], steps: int) -> bool:
    return bool(found) and found[-1]["step"] >= steps and all(f"eval/{name}/accuracy" in found[-1] for name in SETS)


def train(run_dir: Path, settings: list[str], steps: int) -> list[dict[str, Any]]:
    """Run, or go on with, `asyncrl local` in `run_dir` to its end. Returns the rows of its metrics."""
    if not finished(measured(run_dir), steps):
        command = [sys.executable, "-m", "asyncrl.cli", "local", f"run.dir={run_dir}", "resume=auto", *settings]
        with run_dir.with_suffix(".log").open("ab") as output:
            code = subprocess.call([*command, f"learner.steps={steps}"], stdout=output, stderr=subprocess.STDOUT)
        if code:
            raise SystemExit(f"{' '.join(command)}\nended with exit code {code}: see {run_dir.with_suffix('.log')}")
    return measured(run_dir)


def shown(row: dict[str, Any], name: str) -> str:
    mean, low, high = (row[f"eval/{name}/accuracy{end}"] for end in ("", "_low", "_high"))
    return f"{100 * mean:.1f} ({100 * low:.1f}–{100 * high:.1f})"


def counted(totals: list[float]) -> float:
    """Return the last value of a counter that starts at 0 again whenever the run was resumed."""
    return sum(before for before, after in pairwise([*totals, 0.0]) if after < before)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the line of a run."""
    evaluated = [row for row in found if f"eval/{next(iter(SETS))}/accuracy" in row]
    trained = [row for row in found if not is_evaluation(row)]
    return {
        **{f"{name}, before": shown(evaluated[0], name) for name in SETS},
        **{f"{name}, after": shown(evaluated[-1], name) for name in SETS},
        "mean staleness": round(sum(row["staleness/mean"] for row in trained) / len(trained), 2),
        "largest staleness": round(max(row["staleness/max"] for row in trained)),
        "trained tokens": round(counted([row["goodput/trained_tokens"] for row in trained])),
        "steps": len(trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=list(RUNS), help="only this run; without a line while the other is missing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"folder": None, "steps": 2})
    try:
        model = pretrained_model()
    except MissingModelError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch)).absolute()
        settings = [f"model.path={model}", *write(folder), *TASK, *(SMOKE if given.smoke else ())]
        for name in [given.only] if given.only else RUNS:
            train(folder / name, [*settings, *RUNS[name], *given.overrides], given.steps)
        found = {name: measured(folder / name) for name in RUNS}
        if all(finished(lines, given.steps) for lines in found.values()):
            answer("pretrained", {name: summary(lines) for name, lines in found.items()}, smoke=given.smoke)


if __name__ == "__main__":
    main()
