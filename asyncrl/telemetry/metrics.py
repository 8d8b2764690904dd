"""What the learner writes down: one JSON object per step, and the same rows to the optional sinks.

consumes: a row of floats per trained step · waits for: nothing but the disk · read by: the live view, the report, you
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from asyncrl.errors import ConfigError, RunFolderError
from asyncrl.telemetry.run_folder import redacted

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class Sink(Protocol):
    """Somewhere else the rows go."""

    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """`metrics.jsonl` and `samples.jsonl` of one run, appended line by line: a killed run loses no finished row.

    After a resume from `resume_step` the rows of later steps are dropped first: they belong to the history that was
    rolled back and are about to be written again. None is a fresh start.

    Raises:
        ConfigError: a sink was asked for whose extra is not installed.
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
        if wandb:
            self._sinks.append(WandbSink(Path(run_dir), run_name, redacted(config), resume_step))
        if tensorboard:
            self._sinks.append(TensorboardSink(Path(run_dir)))
        self._metrics = _open_after(Path(run_dir) / METRICS_FILE, resume_step or 0)
        self._samples = _open_after(Path(run_dir) / SAMPLES_FILE, resume_step or 0)

    def write(self, step: int, policy_version: int, row: Mapping[str, float]) -> None:
        """Append one row. A value that is no finite number becomes null: JSON has no NaN."""
        values = {name: _number(value) for name, value in row.items()}
        line = {"step": step, "policy_version": policy_version, "time": round(time.time(), 3), **values}
        _append(self._metrics, json.dumps(line, allow_nan=False))
        finite = {name: value for name, value in values.items() if value is not None}
        for sink in self._sinks:
            sink.write(step, {"policy_version": policy_version, **finite})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append some trajectories of this step: prompt, completion, reward."""
        for row in rows:
            _append(self._samples, json.dumps({"step": step, **row}, ensure_ascii=False, default=str))

    def close(self) -> None:
        for file in (self._metrics, self._samples):
            with contextlib.suppress(OSError):  # the write that failed has told, and its text is still in here
                file.close()
        for sink in self._sinks:
            sink.close()


def _append(file: TextIO, line: str) -> None:
    """Raises RunFolderError when the disk does not take it."""
    try:
        file.write(line + "\n")
    except OSError as error:
        raise RunFolderError(
            f"{file.name} cannot be written: {error.strerror or error}. Free space there, then go on with resume=auto"
        ) from error


def _number(value: float) -> float | int | None:
    """Numpy scalars and whole floats included."""
    if isinstance(value, int):
        return int(value)
    plain = float(value)
    return plain if math.isfinite(plain) else None


def _open_after(path: Path, last_step: int) -> TextIO:
    """Open for appending, only whole rows up to `last_step` kept. Line-buffered: each row is on its way at once."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= last_step]
        shorter = path.with_suffix(".tmp")
        shorter.write_text("".join(line + "\n" for line in kept))
        shorter.replace(path)
    return path.open("a", buffering=1)


def _step_of(line: str) -> float:
    """A line cut off by a kill counts as endlessly late: it is dropped."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class WandbSink:
    """Weights & Biases. Project, entity, keys and offline mode come from its own environment variables."""

    def __init__(self, run_dir: Path, run_name: str, config: dict[str, Any], resume_step: int | None) -> None:
        module = _optional("wandb", "wandb")
        id_file = run_dir / "wandb_id.txt"
        resumed = resume_step is not None and id_file.exists()
        run_id = id_file.read_text().strip() if resumed else uuid.uuid4().hex[:12]
        id_file.write_text(run_id)
        self._run = module.init(
            name=run_name, id=run_id, dir=str(run_dir), config=config, resume="allow" if resumed else None
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """Event files under `tensorboard/` in the run folder."""

    def __init__(self, run_dir: Path) -> None:
        _optional("tensorboard", "tensorboard")
        self._writer = _optional("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _optional(module: str, extra: str) -> Any:
    """Import by name: these packages are extras, and torch must not load with this module."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"telemetry.{extra}=true needs the extra: pip install 'asyncrl[{extra}]'. Or set telemetry.{extra}=false"
        ) from error
