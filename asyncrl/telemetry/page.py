"""The report of some runs as one HTML file: no network, nothing beside it. `page.html` draws what is put into it here.

A curve of more than `POINTS` values is drawn by the smallest, largest and last value of each of as many parts of it, so
that no spike is lost; all values are those of `metrics.jsonl`, the ones of parts to six digits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.alarms import ALARMS_FILE
from asyncrl.telemetry.compared import (
    SHOWN,
    TAIL,
    TAIL_MOST,
    End,
    Run,
    best_of,
    different_settings,
    end_of_values,
    names_of,
    settings_of,
    shown,
)
from asyncrl.telemetry.evaluations import METRICS
from asyncrl.telemetry.metrics import EVAL_SAMPLES_FILE, METRICS_FILE, SAMPLES_FILE
from asyncrl.telemetry.registry import OF_EVERY_ROW, metric_of
from asyncrl.telemetry.report import Row, read_metrics

TEMPLATE = Path(__file__).with_name("page.html")
POINTS = 200
"""Of a curve: one for every two pixels of a panel."""
SAMPLES, SAMPLE_TEXT, END = 300, 4000, "finish_reason"
"""Newest rows of `samples.jsonl` and of `eval_samples.jsonl` of each run, characters of a prompt or completion, and
how it ended."""
HEAD = (
    "Every number is one of metrics.jsonl, or a mean of some. The band around a curve goes from the smallest to the "
    "largest value of the steps at a place, the curve through the last of them. A legend's box hides its run."
)
Curve = dict[str, list[float]]
Series = dict[str, tuple[list[int], list[float]]]
"""Metric -> (steps, values)."""
Drawn = dict[str, tuple[Curve, End | None]]
"""Metric -> what is drawn of it, and where it ended."""
ALONE_BYTES = 32 << 20
"""Of metrics that one process reads in about a second."""


def page_of(folders: Sequence[Path]) -> str:
    """The whole file.

    Raises:
        RunFolderError: a folder is none of a run.
    """
    runs: list[dict[str, Any]] = []
    compared: list[Run] = []
    curves: dict[str, list[Curve]] = {}
    ends: dict[str, list[End | None]] = {}
    compared += [
        Run(name, folder, settings_of(folder), ()) for folder, name in zip(folders, names_of(folders), strict=True)
    ]
    for place, (run, drawn) in enumerate(zip(compared, all_drawn(folders), strict=True)):
        for metric, (curve, end) in drawn.items():
            curves.setdefault(metric, [{} for _ in folders])[place] = curve
            ends.setdefault(metric, [None for _ in folders])[place] = end
        last = max((end.step for _, end in drawn.values() if end), default=0)
        runs.append({"name": run.name, "folder": str(run.folder), "steps": last})
    main = [metric for metric in [*evaluations_in(curves), *SHOWN] if metric in curves]
    data = {
        "head": HEAD,
        "how": f"Mean over the last {TAIL:.0%} of the steps, at most {TAIL_MOST}; of evaluations the last one. ★: best",
        "runs": runs,
        "metrics": {metric: words_of(metric) for metric in curves},
        "order": sorted(curves),
        "main": main,
        "curves": curves,
        "ends": [{"metric": metric, "ends": marked(metric, ends[metric])} for metric in main],
        "settings": [[key, *map(shown, values)] for key, values in different_settings(compared).items()],
        "alarms": [row for run in runs for row in alarms_of(run)],
        "samples": [row for run in runs for row in samples_of(run)],
    }
    # `</script>` in a completion would end the script that holds it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = text.encode(errors="replace").decode()  # half a character, of a text that was cut in it
    return TEMPLATE.read_text().replace("@DATA@", text, 1)


def all_drawn(folders: Sequence[Path]) -> list[Drawn]:
    """`drawn` of each: one after the other in a process, since the rows of many do not fit into memory together; in
    several, where there is more to read than it takes to start them."""
    sizes = [path.stat().st_size for folder in folders if (path := folder / METRICS_FILE).exists()]
    workers = min(len(folders), os.cpu_count() or 1)
    if sum(sizes) < ALONE_BYTES or workers < 2 or threading.active_count() > 1:  # a fork copies no other thread
        return [drawn(folder) for folder in folders]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(drawn, folders))


def drawn(folder: Path) -> Drawn:
    return {name: (curve_of(*found), end_of_values(name, *found)) for name, found in columns(folder).items()}


def columns(folder: Path) -> Series:
    """Every metric with its values, by name. Rows with the same names are taken together: most rows of a run."""
    shapes: dict[tuple[str, ...], list[Row]] = {}
    for row in read_metrics(folder):
        shapes.setdefault(tuple(row), []).append(row)
    found: Series = {}
    for names, rows in shapes.items():
        steps = [row["step"] for row in rows]
        for name, values in zip(names, zip(*(row.values() for row in rows), strict=True), strict=True):
            if name in OF_EVERY_ROW:
                continue
            of_some, kept = finite(steps, values)
            if name in found:
                found[name] = by_step(found[name][0] + of_some, found[name][1] + kept)
            elif kept:
                found[name] = of_some, kept
    return found


def finite(steps: list[int], values: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Those that are numbers; JSON's 1e999 is read as none."""
    with contextlib.suppress(TypeError, OverflowError):  # of a sum with what is no number
        if math.isfinite(math.fsum(values)):
            return steps, list(values)
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if isinstance(v, int | float) and math.isfinite(v)]
    return [s for s, _ in pairs], [v for _, v in pairs]


def by_step(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """In their order: rows of several shapes follow each other."""
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return [steps[place] for place in order], [values[place] for place in order]


def curve_of(steps: list[int], values: list[float]) -> Curve:
    """`x` and `y`; of many, of each part its last step, its smallest, largest and last value."""
    if len(values) <= POINTS:
        return {"x": list(steps), "y": values}
    bounds = [len(values) * part // POINTS for part in range(POINTS + 1)]
    parts = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {
        "x": [steps[end - 1] for end in bounds[1:]],
        "y": [rounded(part[-1]) for part in parts],
        "low": [rounded(min(part)) for part in parts],
        "high": [rounded(max(part)) for part in parts],
    }


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def evaluations_in(curves: dict[str, Any]) -> list[str]:
    return sorted(name for name in curves if name.startswith("eval/") and name.rpartition("/")[2] in METRICS)


def words_of(metric: str) -> dict[str, str]:
    known = metric_of(metric)
    return {"unit": known.unit, "meaning": known.meaning} if known else {"unit": "", "meaning": ""}


def marked(metric: str, ends: list[End | None]) -> list[dict[str, Any] | None]:
    """Each end, and whether it is the best of them."""
    best = best_of(metric, ends)
    return [end and {"value": end.value, "last": end.last, "step": end.step, "best": end.value == best} for end in ends]


def alarms_of(run: dict[str, Any]) -> list[list[Any]]:
    rows = read_lines(Path(run["folder"]) / ALARMS_FILE).rows
    return [[run["name"], *(cell(row.get(key)) for key in ("step", "name", "said", "advice"))] for row in rows]


def samples_of(run: dict[str, Any]) -> list[list[Any]]:
    """The newest first."""
    files = (Path(run["folder"]) / name for name in (SAMPLES_FILE, EVAL_SAMPLES_FILE))
    rows = [row for file in files for row in read_lines(file).rows[: -SAMPLES - 1 : -1]]
    rows.sort(key=lambda row: row["step"] if isinstance(row.get("step"), int) else -1, reverse=True)
    return [[run["name"], *sample_cells(row)] for row in rows]


def sample_cells(row: dict[str, Any]) -> list[Any]:
    """What stands behind the run, in the order of the page's heads."""
    prompt, completion = texts_of(row)
    known = map(cell, (row.get("step"), row.get("reward"), parts_of(row), prompt))
    fate = row.get("dropped") or row.get("failed") or ""
    origin = (span_of(row, "version"), span_of(row, "staleness"), fate, row.get("eval_set", "training"))
    segments = segments_of(row)
    said = {"value": completion, "segments": segments} if segments else completion
    return [*known, said, cell(row.get(END)), *map(cell, origin)]


def span_of(row: dict[str, Any], name: str) -> float | str | None:
    """From the smallest to the largest; where they are one, that."""
    low, high = (cell(row.get(f"{name}_{end}")) for end in ("min", "max"))
    return low if low == high or high is None else f"{low} to {high}"


def segments_of(row: dict[str, Any]) -> list[list[str]]:
    """`[fate, text]` of parts of the completion, as `learner.samples` writes them, as far as the completion is shown;
    none where it is of one part."""
    given, room = row.get("segments"), SAMPLE_TEXT
    found: list[list[str]] = []
    for each in given if isinstance(given, list) else ():
        if isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each) and room > 0:
            found.append([each[0], each[1][:room]])
            room -= len(each[1])
    return [*found, ["", " …"]] if room < 0 else found


def cell(value: Any) -> float | str | None:
    """As JSON has it: the reward of an episode that got none is NaN, and a browser reads no page with one."""
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    return None if value is None else str(value)


def parts_of(row: dict[str, Any]) -> str:
    rewards = row.get("rewards")
    if not isinstance(rewards, dict):
        return ""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in rewards.items()
    )


def texts_of(row: dict[str, Any]) -> list[str]:
    texts = [str(row.get(key, "")) for key in ("prompt", "completion")]
    return [text if len(text) <= SAMPLE_TEXT else f"{text[:SAMPLE_TEXT]} … ({len(text)} characters)" for text in texts]
