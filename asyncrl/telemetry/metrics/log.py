"""Writes the learner's metrics: one JSON object per step, and the same rows to optional sinks.

consumes: a row of floats per trained step · waits for: the disk · read by: live view, report, users
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.storage.lines import LineFile, open_kept
from asyncrl.telemetry.folder.run_folder import METRICS_FILE, redacted
from asyncrl.telemetry.metrics.evaluations import is_evaluation

log = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
EVAL_SAMPLES_FILE = "eval_samples.jsonl"
HISTOGRAMS_FILE = "histograms.jsonl"
PARTS, MOST_PARTS = "rewards/", 64
"""Prefix of, and limit on, the named parts of rewards. A reward function chooses the names: a new one for each row
would make lines as long as the data."""
Histogram = tuple[Sequence[float], Sequence[float]]
"""[n + 1] edges, ascending, and [n] counts between two of them."""


class Sink(Protocol):
    """An additional destination of the rows."""

    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """`metrics.jsonl`, `samples.jsonl`, `eval_samples.jsonl` and `histograms.jsonl` of one run, appended line by line:
    a killed run loses no finished row.

    On a resume from `resume_step`, rows of later steps are dropped first: they belong to the history that was rolled
    back, and will be written again. None is a fresh start.

    Raises:
        ConfigError: the extra of a requested sink is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        run_name: str,
        config: dict[str, Any],
        wandb: bool,
        tensorboard: bool,
        resume_step: int | None,
    ) -> None:
        self._sinks: list[Sink] = []
        self._parts: set[str] = set()
        self._left_out = False
        if wandb:
            self._sinks.append(WandbSink(Path(run_dir), run_name, redacted(config), resume_step))
        if tensorboard:
            self._sinks.append(TensorboardSink(Path(run_dir), resume_step))
        self._metrics = self._open(Path(run_dir) / METRICS_FILE, resume_step or 0)
        self._samples = self._open(Path(run_dir) / SAMPLES_FILE, resume_step or 0)
        self._evaluated = self._open(Path(run_dir) / EVAL_SAMPLES_FILE, resume_step or 0)
        self._histograms = self._open(Path(run_dir) / HISTOGRAMS_FILE, resume_step or 0)

    def _open(self, path: Path, last_step: int) -> LineFile:
        return open_kept(path, lambda row: _step_of(row) <= last_step)

    def write(self, step: int, policy_version: int | None, row: Mapping[str, float]) -> None:
        """Append one row. A value that is not finite becomes null: JSON has no NaN.

        Args:
            policy_version: None if nothing is published.

        Raises:
            DiskFullError: there was no space.
        """
        values = {name: _number(value) for name, value in row.items() if self._is_kept(name)}
        version = {} if policy_version is None else {"policy_version": policy_version}
        line = {"step": step, **version, "time": round(time.time(), 3), **values}
        self._metrics.append([line], allow_nan=False)
        finite = {name: value for name, value in values.items() if value is not None}
        for sink in self._sinks:
            sink.write(step, {**version, **finite})

    def _is_kept(self, name: str) -> bool:
        if not name.startswith(PARTS) or name in self._parts:
            return True
        if len(self._parts) < MOST_PARTS:
            self._parts.add(name)
            return True
        if not self._left_out:
            self._left_out = True
            log.warning(
                "%s and other parts of rewards are left out of the metrics, because there are already %d with other "
                "names. Let the reward function return the same few names each time",
                *(name.removeprefix(PARTS), MOST_PARTS),
            )
        return False

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str = "") -> None:
        """Append trajectories of this step, or of an evaluation of its weights. Raises DiskFullError."""
        file, of_set = (self._evaluated, {"eval_set": eval_set}) if eval_set else (self._samples, {})
        file.append(({"step": step, **of_set, **row} for row in rows), ensure_ascii=False, default=str)
        for sink in self._sinks if rows else ():
            sink.samples(step, rows, eval_set)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Append the histograms of this step, by name. Raises DiskFullError."""
        line = {name: {"edges": list(edges), "counts": list(counts)} for name, (edges, counts) in found.items()}
        self._histograms.append([{"step": step, **line}], allow_nan=False)
        for sink in self._sinks:
            sink.histograms(step, found)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _number(value: float) -> float | int | None:
    """Convert a value, which may be a numpy scalar, to a plain number; None if it is not finite."""
    if isinstance(value, int):
        return int(value)
    plain = float(value)
    return plain if math.isfinite(plain) else None


def _step_of(row: Mapping[str, Any]) -> float:
    """Return the step of a row; infinity if it has none, so that a resume drops it."""
    step = row.get("step")
    return step if isinstance(step, int) else math.inf


COLUMNS = ("prompt", "completion", "reward", "components", "version", "staleness", "end", "dropped or failed")
TABLE_EVERY_S = 60.0


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return all cells as texts, since W&B accepts one type per column. In completions, parts that were not learned
    are in brackets."""
    completion = row.get("completion", "")
    if "segments" in row:
        completion = "".join(text if fate == "learned" else f"[{fate}: {text}]" for fate, text in row["segments"])
    known = (row.get("prompt"), completion, row.get("reward"), parts_of(row))
    origin = (span_of(row, "version"), span_of(row, "staleness"), row.get("finish_reason"))
    return ["" if each is None else str(each) for each in (*known, *origin, fate_of(row))]


def cell(value: Any) -> float | str | None:
    """Return the value for JSON: the missing reward of an episode is NaN, and browsers cannot read JSON with NaN."""
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    return None if value is None else str(value)


def fate_of(row: Mapping[str, Any]) -> str:
    """Return why a sample was dropped or failed; empty if it was not."""
    said = (row.get("dropped") or row.get("failed") or "", row.get("detail") or "")
    return ": ".join(str(each) for each in said if each)


def span_of(row: Mapping[str, Any], name: str) -> float | str | None:
    """Return the range from the smallest to the largest value, or the value if both are equal."""
    low, high = (cell(row.get(f"{name}_{end}")) for end in ("min", "max"))
    return low if low == high or high is None else f"{low} to {high}"


def parts_of(row: Mapping[str, Any]) -> str:
    """Return the components of a sample's reward as text."""
    rewards = row.get("rewards")
    if not isinstance(rewards, dict):
        return ""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in rewards.items()
    )


class WandbSink:
    """Weights & Biases. Project, entity, keys and offline mode come from its own environment variables."""

    def __init__(self, run_dir: Path, run_name: str, config: dict[str, Any], resume_step: int | None) -> None:
        module = self._module = _optional("wandb", "wandb")
        id_file = run_dir / "wandb_id.txt"
        resumed = resume_step is not None and id_file.exists()
        run_id = id_file.read_text().strip() if resumed else uuid.uuid4().hex[:12]
        id_file.write_text(run_id)
        self._run = module.init(
            name=run_name, id=run_id, dir=str(run_dir), config=config, resume="allow" if resumed else None
        )
        # W&B drops values logged for a step of its own counter that has passed: late evaluations, and everything
        # trained again after a resume. So its counter counts rows, and curves are drawn over this metric.
        self._run.define_metric("*", step_metric="step")
        self._table_at = -math.inf

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": step})

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._log(step, {k: v for k, v in row.items() if k.startswith("eval/")} if is_evaluation(row) else row)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        made = {
            name: self._module.Histogram(np_histogram=(list(counts), list(edges)))
            for name, (edges, counts) in found.items()
        }
        self._log(step, made)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str) -> None:
        """Log a table for each evaluation, and for steps at least `TABLE_EVERY_S` seconds apart, since each table is a
        file to upload."""
        if not eval_set and time.monotonic() - self._table_at < TABLE_EVERY_S:
            return
        table = self._module.Table(columns=list(COLUMNS), data=[_cells(row) for row in rows])
        self._log(step, {f"eval/{eval_set}/samples" if eval_set else "samples": table})
        if not eval_set:
            self._table_at = time.monotonic()

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """Event files under `tensorboard/` in the run folder."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        _optional("tensorboard", "tensorboard")
        writer = _optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        begins = 0 if resume_step is None else resume_step + 1
        self._writer = writer(str(run_dir / "tensorboard"), purge_step=begins)  # hides steps that were rolled back

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Write histograms. For the sums, each value counts as the middle of its bin."""
        for name, (edges, counts) in found.items():
            middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
            pairs = list(zip(middles, counts, strict=True))
            self._writer.add_histogram_raw(
                name,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(middle * count for middle, count in pairs),
                sum_squares=sum(middle**2 * count for middle, count in pairs),
                bucket_limits=list(edges[1:]),
                bucket_counts=list(counts),
                global_step=step,
            )

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]], eval_set: str) -> None:
        """TensorBoard has no tables."""

    def close(self) -> None:
        self._writer.close()


def _optional(module: str, extra: str) -> Any:
    """Import a module by name, because these packages are extras and torch must not be loaded with this module."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"telemetry.{extra}=true needs the extra: pip install 'asyncrl[{extra}]'. Or set telemetry.{extra}=false"
        ) from error
