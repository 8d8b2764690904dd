"""How long does the learner wait while its batch fills up, with and without `learner.early_groups`?

    python -m benchmarks.early [--steps 24] [--early 2] [--spread 3.0] [--repeats 1] [key=value ...]

Runs the quickstart's task with a model of 3 M parameters, as a user starts it, with 16 groups of 8 per step. Rewards
wait (`parts/slow_reward.py`): each group becomes complete at some time within `--spread` seconds, and nothing computes
meanwhile. Rows: `max_staleness` 0, where nothing is generated while the learner trains, and `max_staleness` 2 with a
pipeline depth of 1, each without and with `early_groups`. Columns: groups trained per second, the share of the time
that the learner waited, the seconds of a step in which it trained on groups before the batch was full and after, and
the mean staleness.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.model import tiny_model
from benchmarks.parts.quickstart import SMALL, run_quickstart
from benchmarks.parts.slow_reward import SPREAD_S

WIDER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
BOUNDS = ((0, 0), (2, 1))
"""Pairs of `max_staleness` and `pipeline_depth`."""


def settings(given: argparse.Namespace, model: Path, bound: tuple[int, int], early: int) -> Sequence[str]:
    return (
        *(f"model.path={model}", "rollout.host=process", "rollout.group_size=8", "learner.groups_per_step=16"),
        *(SMALL if given.smoke else ()),
        *("eval.path=", "eval.every=0", f"learner.steps={given.steps}", "reward.workers=2", "reward.concurrency=128"),
        f"reward.function={Path(__file__).parent / 'parts' / 'slow_reward.py'}:score",
        *(f"replay.max_staleness={bound[0]}", f"replay.pipeline_depth={bound[1]}", f"learner.early_groups={early}"),
        *given.overrides,
    )


def of_run(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a run: means over its steps, and rates over all of them together."""

    def mean(name: str) -> float:
        return statistics.mean(row.get(name, 0.0) for row in rows)

    seconds = sum(row["time/step"] for row in rows)
    return {
        "groups_per_s": round(sum(row["step/groups"] for row in rows) / seconds, 2),
        "idle": round(sum(row["time/wait_batch"] for row in rows) / seconds, 3),
        "early_s": round(mean("time/early"), 3),
        "train_s": round(mean("time/train"), 3),
        "early_groups": round(mean("step/early_groups"), 1),
        "staleness": round(mean("staleness/mean"), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--early", type=int, default=2)
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"steps": 3, "warm_up": 1, "early": 1, "spread": 0.5})
    os.environ[SPREAD_S] = str(given.spread)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model(**({} if given.smoke else WIDER)).save_pretrained(model)  # pyright: ignore[reportCallIssue]
        save_byte_tokenizer(model)
        for repeat in range(given.repeats):
            for bound in BOUNDS[:1] if given.smoke else BOUNDS:
                for early in (given.early,) if given.smoke else (0, given.early):
                    run_dir = Path(folder) / f"{repeat}-{bound[0]}-{early}"
                    run = run_quickstart(run_dir, settings(given, model, bound, early))
                    found = of_run(run.rows[given.warm_up :])
                    result.setdefault(f"max_staleness {bound[0]}, early_groups {early}", []).append(found)
    answer("early", {name: rows[0] if len(rows) == 1 else rows for name, rows in result.items()}, smoke=given.smoke)


if __name__ == "__main__":
    main()
