"""Rows in words, and the learner's log, which prints them and the alarms that they raise."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import LOG_DIR, config_to_dict
from asyncrl.schema import RunSettings
from asyncrl.storage.lines import LineFile, read_lines
from asyncrl.telemetry.folder.run_folder import STOP_FILE
from asyncrl.telemetry.metrics.alarms import FREE_BYTES, Alarms, Stall
from asyncrl.telemetry.metrics.evaluations import evaluations
from asyncrl.telemetry.metrics.log import MetricsLog
from asyncrl.telemetry.metrics.raised import ALARMS_FILE, ended_by_resume

Row = Mapping[str, Any]

BUSY_BELOW = 0.1
"""Idle fractions below this are noise, not waiting."""


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def who_waits(row: Row) -> str:
    """Return which side of the system is the bottleneck, according to the two idle fractions."""
    learner, rollout = row.get("idle/learner"), row.get("idle/rollout")
    if learner is None and rollout is None:
        return ""
    learner, rollout = learner or 0.0, rollout or 0.0
    if max(learner, rollout) < BUSY_BELOW:
        return "nobody waits"
    if learner >= rollout:
        return f"learner waits for rollouts {learner:.0%}"
    return f"rollouts wait for learner {rollout:.0%}"


def failed_rewards(row: Row) -> str:
    """Return the number of completions so far that got no reward, as `12 (raised 10, timed_out 2)`; empty for none."""
    prefix = "reward/failed_"
    count = row.get("reward/failed") or 0
    reasons = ", ".join(
        f"{name.removeprefix(prefix)} {row[name]:.0f}" for name in sorted(row) if name.startswith(prefix)
    )
    return f"{count:.0f}{f' ({reasons})' if reasons else ''}" if count else ""


def _versions(row: Row, name: str) -> str:
    """Say so if an evaluation went on while newer weights were loaded; the row has the version of its oldest token."""
    oldest, newest = row.get("policy_version"), row.get(f"eval/{name}/version_max")
    return f" (versions {oldest} to {newest:.0f})" if oldest is not None and newest and newest > oldest else ""


def format_line(row: Row) -> str:
    """Format one step as one line; values that the row does not have are left out."""
    parts = [f"step {row['step']}", *([f"version {row['policy_version']}"] if "policy_version" in row else [])]
    for label, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "loss/total", "{:+.4f}"),
        ("staleness", "staleness/mean", "{:.2f}"),
        ("kl", "kl/behavior", "{:.4f}"),
        ("tokens/s", "perf/trained_tokens_per_s", "{:.0f}"),
    ):
        value = row.get(name)
        if value is not None:
            parts.append(f"{label} {form.format(value)}")
    parts += [f"eval {name} {evaluation}{_versions(row, name)}" for name, evaluation in evaluations(row).items()]
    failed = failed_rewards(row)
    parts += [f"rewards failed {failed}"] if failed else []
    waiting = who_waits(row)
    return " | ".join([*parts, waiting] if waiting else parts)


class PrintingLog(MetricsLog):
    """A `MetricsLog` that also prints one line per step and the alarms on stdout, and writes alarms to `alarms.jsonl`.
    If alarms are to stop the run, it creates the file that asks the learner to save and end."""

    _alarms: Alarms
    _stall: Stall
    _told: LineFile
    _folder: Path
    _stops: Path | None

    @classmethod
    def of(
        cls, given: RunSettings, run_dir: Path, step: int, *, on_alarm: str = "continue", ignored: Sequence[str] = ()
    ) -> PrintingLog:
        """Open the run's metrics files, cut back to the checkpoint of `step` from which training resumes; 0: none."""
        made = cls(
            run_dir,
            given.run.name,
            config_to_dict(given),
            wandb=given.telemetry.wandb,
            tensorboard=given.telemetry.tensorboard,
            resume_step=step or None,
        )
        made._alarms, made._stall = Alarms(ignored), Stall(ignored)
        made._told = made._open(run_dir / ALARMS_FILE, step)
        made._told.append(each.as_row() for each in ended_by_resume(read_lines(run_dir / ALARMS_FILE).rows, step))
        made._stops = run_dir / LOG_DIR / STOP_FILE if on_alarm == "stop" else None
        made._folder = run_dir
        return made

    def write(self, step: int, policy_version: int | None, row: Mapping[str, float]) -> None:
        super().write(step, policy_version, row)
        version = {} if policy_version is None else {"policy_version": policy_version}
        print(format_line({"step": step, **version, **row}), flush=True)
        free = {FREE_BYTES: shutil.disk_usage(self._folder).free}
        now = time.monotonic()
        late = self._stall.silence(now) if "time/step" in row else []  # not for an evaluation after the last step
        found = self._alarms.row({"step": step, **row, **free})
        for raised in (*late, *self._stall.row({"step": step, **row}, now), *found):
            print(raised, flush=True)
            self._told.append([raised.as_row()])
        if self._stops is not None and any(raised.stops for raised in found):  # not a stall, which this row has ended
            self._stops.touch()
