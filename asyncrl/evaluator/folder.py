"""The folder of an evaluation: which evaluation it is, which rows are done, and its results.

    runs/eval-.../  made_of.json  samples.jsonl  results.json

`made_of.json` holds what identifies the evaluation (`identity.py`). `samples.jsonl` grows row by row. If both exist, a
start continues with the missing rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import RunFolderError
from asyncrl.evaluation.samples import Sample, to_line
from asyncrl.evaluator.identity import differences
from asyncrl.evaluator.samples import by_row, is_done
from asyncrl.storage.full_disk import disk_space
from asyncrl.storage.lines import open_kept, rows_in
from asyncrl.storage.occupancy import alone_in, holders
from asyncrl.storage.sealed import replace_text

EVAL_FILE = "made_of.json"
SAMPLES_FILE = "samples.jsonl"
RESULTS_FILE = "results.json"


class EvalFolder:
    """One evaluation of `rows` rows with `samples` samples each; see `opened`."""

    def __init__(self, path: Path, *, rows: int, samples: int) -> None:
        self.path = path
        self._rows, self._samples = rows, samples
        self._lines = open_kept(path / SAMPLES_FILE, lambda _: True)
        found = by_row(rows_in(path / SAMPLES_FILE))
        self.done = {row: samples for row, samples in found.items() if row < rows}
        """Row -> its samples, including failed ones."""

    def missing(self) -> list[int]:
        """Rows still to be evaluated: those without samples, or with failed ones."""
        return [row for row in range(self._rows) if not is_done(self.done.get(row, ()), self._samples)]

    def add(self, row: int, samples: Sequence[Sample]) -> None:
        """Append the samples of a row, all or none. Raises DiskFullError."""
        self._lines.append((to_line(sample) for sample in samples), ensure_ascii=False, allow_nan=False)
        self.done[row] = list(samples)

    def write_results(self, results: Mapping[str, Any]) -> Path:
        path = self.path / RESULTS_FILE
        _write(path, results)
        return path


@contextmanager
def opened(path: Path, made_of: Mapping[str, Any], *, samples: int, overwrite: bool) -> Iterator[EvalFolder]:
    """Create or reopen the folder, and hold it so that no other process evaluates in it meanwhile.

    Args:
        made_of: see `identity`; `eval.rows` is the number of rows.

    Raises:
        RunFolderError: it belongs to another evaluation or to a run, or is in use.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"run.dir={path} cannot be made: {error.strerror or error}. Give another run.dir"
        ) from error
    with alone_in(path) as alone:
        if not alone:
            raise RunFolderError(
                f"run.dir={path} belongs to an evaluation that is in progress{holders(path)}. Stop it first, or give "
                "another run.name"
            )
        _take(path, made_of, overwrite)
        yield EvalFolder(path, rows=int(made_of["eval.rows"]), samples=samples)


def _take(path: Path, made_of: Mapping[str, Any], overwrite: bool) -> None:
    """Raises RunFolderError if `path` holds anything but the evaluation identified by `made_of`."""
    file = path / EVAL_FILE
    if not file.is_file() and any(entry.name != f"{EVAL_FILE}.tmp" for entry in path.iterdir()):
        raise RunFolderError(
            f"run.dir={path} holds files but no {EVAL_FILE}, so it is not the folder of an evaluation and is not "
            "touched. Give another run.dir or run.name"
        )
    if file.is_file() and overwrite:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if not file.is_file():
        _write(file, {"made_of": made_of})
        return
    changed = differences(_made_of(file), made_of)
    if changed:
        raise RunFolderError(
            f"run.dir={path} holds an evaluation with other settings: {'; '.join(changed)}. Give the same settings to "
            "continue it, another run.name, or overwrite=true to start again"
        )


def _made_of(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text())["made_of"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{file} cannot be read ({type(error).__name__}: {error}), so it is not known which settings made the "
            "samples beside it. Give another run.name, or overwrite=true to start again"
        ) from error


def _write(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=1) + "\n"
    with disk_space(path, len(text)):
        replace_text(path, text)
