"""Returns samples as table rows of the report's page; see `asyncrl.telemetry.reports.page`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from asyncrl.storage.lines import row_of, tail
from asyncrl.telemetry.metrics.log import EVAL_SAMPLES_FILE, SAMPLES_FILE, cell, fate_of, parts_of, span_of

SAMPLES, SAMPLE_TEXT, END = 300, 4000, "finish_reason"
"""Limit on the newest rows of each run, of `samples.jsonl` and of `eval_samples.jsonl`; limit on the characters of a
prompt or completion; field with the finish reason."""
MOST_BYTES = 64 << 20
"""Limit on the bytes read of a file: completions of a long run may fill many GB."""


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
