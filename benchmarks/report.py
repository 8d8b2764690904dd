"""How long does `asyncrl report` take to write the page of many long runs, and how long does a browser take to open it?

    python -m benchmarks.report [--runs 20] [--steps 10000] [--repeats 3]

The runs are random walks under the names of a real run's metrics. Medians over the repeats:

    written_s    time of the command, its start included
    page_mb      size of the page
    opened_s     time until headless Chromium with a new profile has read the page, made its tables and drawn the first
                 curves; left out where Chromium is not installed
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from asyncrl.telemetry.metrics.registry import METRICS
from benchmarks.parts.answer import answer, parse
from benchmarks.parts.browser import browser, chromium

DRAWN = """
(async () => {
  const frame = () => new Promise(then => requestAnimationFrame(then));
  while (!document.querySelector("#curves figure")) await frame();
  document.getElementById("curves").scrollIntoView();
  while (!document.querySelector("#curves figure svg path")) await frame();
  return performance.now();
})()
"""


def make_run(folder: Path, steps: int, seed: int) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {seed}\n")
    names = [metric.name for metric in METRICS if not set(metric.name) & set("*{<") and "histogram" not in metric.name]
    walks = np.random.default_rng(seed).normal(0, 1, (steps, len(names))).cumsum(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(walks, start=1):
            row = {"step": step, "time": float(step), "policy_version": step}
            file.write(json.dumps(row | dict(zip(names, values.tolist(), strict=True))) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parse(parser, {"runs": 2, "steps": 50, "repeats": 1})
    written, opened, size = [], [], 0
    with tempfile.TemporaryDirectory() as where:
        folders = [Path(where) / f"run{seed}" for seed in range(given.runs)]
        for seed, folder in enumerate(folders):
            make_run(folder, given.steps, seed)
        for repeat in range(given.repeats):
            page = Path(where) / "page.html"
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "asyncrl.cli", "report", *map(str, folders), "--to", str(page)],
                check=True, capture_output=True,
            )  # fmt: skip
            written.append(time.perf_counter() - began)
            size = page.stat().st_size
            if chromium():
                with browser(Path(where) / f"profile{repeat}") as window:
                    window.open(page)
                    opened.append(window.run(DRAWN) / 1e3)
    result = {"written_s": round(statistics.median(written), 2), "page_mb": round(size / 1e6, 1)}
    if opened:
        result["opened_s"] = round(statistics.median(opened), 2)
    answer("report", result, smoke=given.smoke)


if __name__ == "__main__":
    main()
