"""Writes the report of some runs as one HTML file, without network access or other files. `page.html` draws the data
that this module inserts.

A curve of more than `POINTS` values is divided into `POINTS` parts, and drawn by the smallest, largest and last value
of each, so that no spike is lost. All values are those of `metrics.jsonl`; those of parts are rounded to six digits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.storage.lines import read_lines, row_of, tail
from asyncrl.telemetry.metrics.evaluations import METRICS
from asyncrl.telemetry.metrics.log import (
    EVAL_SAMPLES_FILE,
    HISTOGRAMS_FILE,
    SAMPLES_FILE,
    cell,
    fate_of,
    parts_of,
    span_of,
)
from asyncrl.telemetry.metrics.raised import ALARMS_FILE
from asyncrl.telemetry.metrics.registry import OF_EVERY_ROW, metric_of, unit_of
from asyncrl.telemetry.reports.compared import (
    SHOWN,
    TAIL,
    TAIL_MOST,
    End,
    Run,
    best_of,
    different_settings,
    end_of_values,
    names_of,
    of_each,
    settings_of,
    shown,
)
from asyncrl.telemetry.reports.summary import Row, Series, read_metrics

TEMPLATE = Path(__file__).with_name("page.html")
POINTS = 200
"""Limit on the points of a curve: one for every two pixels of a panel."""
HEAD = (
    "Every number is a value of metrics.jsonl, or a mean of several. The band around an evaluation is its 95 % "
    "interval. The band around any other curve goes from the smallest to the largest value of the steps that one "
    "point stands for; the curve goes through the last of them. The box of a run in a legend hides the run."
)
FAILURES = ("replay/dropped_", "optim/nonfinite_steps")
"""Prefixes of metrics that follow the main ones if they are not always zero."""
SAMPLES, SAMPLE_TEXT, END = 300, 4000, "finish_reason"
"""Limit on the newest rows of each run, of `samples.jsonl` and of `eval_samples.jsonl`; limit on the characters of a
prompt or completion; field with the finish reason."""
MOST_BYTES = 64 << 20
"""Limit on the bytes read of a file: completions of a long run may fill many GB."""
Curve = dict[str, Any]
Interval = tuple[float, float]
Ends = list[float | None]
Drawn = dict[str, tuple[Curve, End | None, Interval | None]]
"""Metric -> its curve, its end, and the interval there if it is an evaluation."""


def page_of(folders: Sequence[Path]) -> str:
    """Return the content of the HTML file.

    Raises:
        RunFolderError: a folder is not a run folder.
    """
    runs: list[dict[str, Any]] = []
    curves: dict[str, list[Curve]] = {}
    ends: dict[str, list[End | None]] = {}
    intervals: dict[str, list[Interval | None]] = {}
    compared = [Run(name, each, settings_of(each), ()) for each, name in zip(folders, names_of(folders), strict=True)]
    for place, (run, found) in enumerate(zip(compared, of_each(folders, drawn), strict=True)):
        for metric, (curve, end, interval) in found.items():
            curves.setdefault(metric, [{} for _ in folders])[place] = curve
            ends.setdefault(metric, [None for _ in folders])[place] = end
            intervals.setdefault(metric, [None for _ in folders])[place] = interval
        last = max((end.step for _, end, _ in found.values() if end), default=0)
        runs.append({"name": run.name, "folder": str(run.folder), "steps": last})
    main = [metric for metric in [*evaluations_in(curves), *SHOWN, *failures_in(curves)] if metric in curves]
    spread = histograms_of(folders)
    data = {
        "head": HEAD,
        "how": (
            f"Mean over the last {TAIL:.0%} of the steps, at most {TAIL_MOST}; for evaluations, the last value. ★: best"
        ),
        "runs": runs,
        "metrics": {metric: words_of(metric) for metric in [*curves, *spread]},
        "order": sorted(curves),
        "main": main,
        "curves": curves,
        "ends": [{"metric": metric, "ends": marked(metric, ends[metric], intervals[metric])} for metric in main],
        "histograms": spread,
        "settings": [[key, *map(shown, values)] for key, values in different_settings(compared).items()],
        "alarms": [row for run in runs for row in alarms_of(run)],
        "samples": [row for run in runs for row in samples_of(run)],
    }
    # `</script>` in a completion would end the script that holds it.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = text.encode(errors="replace").decode()  # a lone surrogate, from a text that was cut
    return TEMPLATE.read_text().replace("@DATA@", text, 1)


def drawn(folder: Path) -> Drawn:
    found = columns(folder)
    made: Drawn = {}
    for name, (steps, values) in found.items():
        around = intervals_of(name, found)
        last = _pair(around[0][-1], around[1][-1]) if around else None
        made[name] = curve_of(steps, values, around), end_of_values(name, steps, values), last
    return made


def _pair(low: float | None, high: float | None) -> Interval | None:
    return None if low is None or high is None else (low, high)


def intervals_of(name: str, found: Series) -> tuple[Ends, Ends] | None:
    """Return the lower and the upper ends of the intervals of an evaluation's values; None if it has none."""
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    if not name.startswith("eval/") or low is None or high is None:
        return None
    lows, highs = (dict(zip(*ends, strict=True)) for ends in (low, high))
    steps = found[name][0]
    return [lows.get(step) for step in steps], [highs.get(step) for step in steps]


def columns(folder: Path) -> Series:
    """Return the values of every metric, by name. Rows with the same names, which are most, are processed together."""
    shapes: dict[tuple[str, ...], list[Row]] = {}
    for row in read_metrics(folder):
        shapes.setdefault(tuple(row), []).append(row)
    found: Series = {}
    for names, rows in shapes.items():
        steps = [row["step"] for row in rows]
        for name, values in zip(names, zip(*(row.values() for row in rows), strict=True), strict=True):
            if name not in OF_EVERY_ROW:
                of_some, kept = finite(steps, values)
                into = found.setdefault(name, ([], []))
                into[0].extend(of_some)
                into[1].extend(kept)
    return {name: known if len(shapes) == 1 else by_step(*known) for name, known in found.items() if known[0]}


def finite(steps: list[int], values: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Return the values that are finite numbers; JSON's 1e999 is not."""
    with contextlib.suppress(TypeError, OverflowError):  # raised by a sum with values that are not numbers
        if math.isfinite(math.fsum(values)):
            return steps, list(values)
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if isinstance(v, int | float) and math.isfinite(v)]
    return [s for s, _ in pairs], [v for _, v in pairs]


def by_step(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Sort values by step, because rows of different shapes were concatenated."""
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return [steps[place] for place in order], [values[place] for place in order]


def curve_of(steps: list[int], values: list[float], around: tuple[Ends, Ends] | None = None) -> Curve:
    """Return `x` and `y`, and the band `around` as `low` and `high`. If there are many values, each part has its last
    step and value, and the smallest and largest value in it."""
    if len(values) <= POINTS:
        band = {} if around is None else {"low": around[0], "high": around[1]}
        return {"x": list(steps), "y": values, **band}
    low, high = around or (values, values)
    bounds = [len(values) * part // POINTS for part in range(POINTS + 1)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    return {
        "x": [steps[part.stop - 1] for part in parts],
        "y": [rounded(values[part.stop - 1]) for part in parts],
        "low": [farthest(min, low[part]) for part in parts],
        "high": [farthest(max, high[part]) for part in parts],
    }


def farthest(choose: Callable[[list[float]], float], ends: Sequence[float | None]) -> float | None:
    known = [each for each in ends if each is not None]
    return rounded(choose(known)) if known else None


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def evaluations_in(curves: dict[str, Any]) -> list[str]:
    return sorted(name for name in curves if name.startswith("eval/") and name.rpartition("/")[2] in METRICS)


def failures_in(curves: dict[str, list[Curve]]) -> list[str]:
    """Return metrics of drops and skips that are not always zero."""
    named = (name for name in sorted(curves) if name.startswith(FAILURES))
    return [
        name
        for name in named
        if any(value for curve in curves[name] for value in curve.get("high", curve.get("y", ())))
    ]


def words_of(metric: str) -> dict[str, str]:
    known = metric_of(metric)
    return {"unit": unit_of(metric), "meaning": known.meaning.replace("`", "") if known else ""}


def marked(metric: str, ends: list[End | None], intervals: Sequence[Interval | None]) -> list[dict[str, Any] | None]:
    """Return each end, and whether it is the best."""
    best = best_of(metric, ends)
    return [
        end
        and {"value": end.value, "last": end.last, "step": end.step, "interval": interval, "best": end.value == best}
        for end, interval in zip(ends, intervals, strict=True)
    ]


def histograms_of(folders: Sequence[Path]) -> dict[str, list[dict[str, Any] | None]]:
    """Return metric -> the last histogram of each run, `{step, edges, counts}`; None if a run has none."""
    found: dict[str, list[dict[str, Any] | None]] = {}
    for place, folder in enumerate(folders):
        row = next((row for line in reversed(tail(folder / HISTOGRAMS_FILE)) if (row := row_of(line))), {})
        for name, each in row.items():
            if name.startswith("histogram/") and is_histogram(each):
                kept = {"step": cell(row.get("step")), "edges": each["edges"], "counts": each["counts"]}
                found.setdefault(name, [None for _ in folders])[place] = kept
    return found


def is_histogram(each: Any) -> bool:
    """Return whether a value is a histogram as `MetricsLog.histograms` writes it."""
    match each:
        case {"edges": [_, _, *_] as edges, "counts": [_, *_] as counts} if len(edges) == len(counts) + 1:
            numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in [*edges, *counts])
            return numbers and edges == sorted(set(edges)) and min(counts) >= 0
    return False


def alarms_of(run: dict[str, Any]) -> list[list[Any]]:
    """Return for each alarm when it began, and for how many steps it held if it was over before the run ended."""
    found: list[dict[str, Any]] = []
    for row in read_lines(Path(run["folder"]) / ALARMS_FILE).rows:
        began = next((each for each in reversed(found) if each.get("name") == row.get("name")), None)
        if row.get("over") is None:
            found.append(row)
        elif began:
            began["over"] = row["over"]
    return [[run["name"], *(cell(row.get(key)) for key in ("step", "name", "said", "over", "advice"))] for row in found]


def samples_of(run: dict[str, Any]) -> list[list[Any]]:
    """Return the samples of a run, the newest first."""
    files = (Path(run["folder"]) / name for name in (SAMPLES_FILE, EVAL_SAMPLES_FILE))
    found = (filter(None, map(row_of, reversed(tail(file, MOST_BYTES)))) for file in files)
    rows = [row for of_file in found for row in itertools.islice(of_file, SAMPLES)]
    rows.sort(key=lambda row: row["step"] if isinstance(row.get("step"), int) else -1, reverse=True)
    return [[run["name"], *sample_cells(row)] for row in rows]


def sample_cells(row: dict[str, Any]) -> list[Any]:
    """Return the cells after the run's name, in the order of the page's column headings."""
    prompt, completion = texts_of(row)
    known = map(cell, (row.get("step"), row.get("reward"), parts_of(row), prompt))
    origin = (
        span_of(row, "version"),
        span_of(row, "staleness"),
        fate_of(row)[:SAMPLE_TEXT],
        row.get("eval_set", "training"),
    )
    segments = segments_of(row)
    said = {"value": completion, "segments": segments} if segments else completion
    return [*known, said, cell(row.get(END)), *map(cell, origin)]


def segments_of(row: dict[str, Any]) -> list[list[str]]:
    """Return `[fate, text]` of the parts of the completion that are shown, as `learner.samples` writes them; empty if
    there is only one part."""
    given, room = row.get("segments"), SAMPLE_TEXT
    found: list[list[str]] = []
    for each in given if isinstance(given, list) else ():
        if isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each) and room > 0:
            found.append([each[0], each[1][:room]])
            room -= len(each[1])
    return [*found, ["", " …"]] if room < 0 else found


def texts_of(row: dict[str, Any]) -> list[str]:
    texts = [str(row.get(key, "")) for key in ("prompt", "completion")]
    return [text if len(text) <= SAMPLE_TEXT else f"{text[:SAMPLE_TEXT]} … ({len(text)} characters)" for text in texts]
