"""How long does training wait after a process of each role is killed with -9, by the size of the model?

    python -m benchmarks.deaths [--millions 1 10 100] [--steps 6] [--repeats 1] [key=value ...]

Runs `asyncrl local` with random weights, one rank and one worker, and kills each of its processes in turn. The cost of
a death is the time from the kill until `--steps` more steps are trained than ever before, minus the time that as many
steps took just before it. Steps trained again from the last checkpoint (one every ten steps) count, and so do batches
that were ready at the kill. Prints one JSON line: by millions of weights and role the seconds lost and the seconds of a
step, and the exit code of the audit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
from asyncrl.memory.model_size import tensor_shapes
from asyncrl.utils.process_tree import command_of
from asyncrl.utils.stopped_processes import kind_of
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.running import Running

ROLES = ("a rollout worker", "the rollout pool", "the replay server", "a learner rank", "torchrun")
WIDTHS = {1: (128, 4), 10: (384, 4), 100: (1024, 6)}
"""Millions of weights -> hidden size and number of layers."""


class Run(Running):
    """A running `asyncrl local`. `stop` must be called to end it."""

    def __init__(self, folder: Path, millions: int, overrides: list[str]) -> None:
        width, layers = WIDTHS[millions]
        shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        settings = [
            "reward.function=asyncrl.rewards.exact_match:exact_match",
            *("rollout.host=process", "rollout.workers=1", "rollout.group_size=2", "rollout.max_new_tokens=8"),
            *("data.max_prompt_tokens=32", "learner.groups_per_step=2", "learner.max_tokens_per_microbatch=512"),
            *("learner.save_every=10", "learner.max_restarts=100", "learner.keep_checkpoints=1"),
            *("learner.lr=1e-6", "rollout.max_in_flight=6", "replay.pipeline_depth=1"),
        ]
        super().__init__(folder, [*settings, *overrides], shape | {"num_attention_heads": width // 64})
        shapes = tensor_shapes(folder / "model" / "model.safetensors").values()
        self.weights = sum(map(math.prod, shapes))
        self.start("local")

    def step(self) -> int:
        """Return the newest trained step, 0 before the first. While steps are trained again, the newest of those."""
        return next((row["step"] for row in self.rows()[-1:]), 0)

    def trained(self, steps: int) -> float:
        """Wait until `steps` more steps are trained than so far. Returns the seconds that this took."""
        wanted, began = self.step() + steps, time.monotonic()
        self.wait(lambda: self.step() >= wanted, f"step {wanted}")
        return time.monotonic() - began

    def process(self, role: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.started["local"].pid).children(recursive=True):
                known = kind_of(command_of(each))
                if known is not None and known.name == role:
                    return each
        return None

    def lost(self, role: str, steps: int) -> dict[str, float]:
        """Kill the process of `role`. Returns the seconds that its death cost, and the seconds of a step before it."""
        self.trained(steps // 2)  # so that the recovery from the death before is not measured
        usual = self.trained(steps)
        self.wait(lambda: self.process(role), f"there is {role}").kill()  # pyright: ignore[reportOptionalMemberAccess]
        return {"lost_s": self.trained(steps) - usual, "step_s": usual / steps}

    def stop(self) -> int:
        """Returns the exit code of its audit."""
        self.end("local")
        return self.audit().returncode


def measured(millions: int, steps: int, repeats: int, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run, found = Run(Path(folder), millions, overrides), dict[str, list[dict[str, float]]]()
        try:
            run.trained(steps)  # warm-up: what is loaded and made only once
            for _ in range(repeats):
                for role in ROLES:
                    found.setdefault(role, []).append(run.lost(role, steps))
        finally:
            audit = run.stop()
    medians = {
        role: {name: round(statistics.median(each[name] for each in deaths), 2) for name in deaths[0]}
        for role, deaths in found.items()
    }
    return {"weights": run.weights, **medians, "audit_exit_code": audit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--steps", type=int, default=6, help="more than are ready at a death")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parse(parser, {"millions": [1], "steps": 2})
    found = {
        f"{millions} M": measured(millions, given.steps, given.repeats, given.overrides) for millions in given.millions
    }
    answer("deaths", found, smoke=given.smoke)


if __name__ == "__main__":
    main()
