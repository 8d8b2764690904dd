"""The end of a run: how it ended, its best checkpoint, and the command that continues it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.checks.hints import nearest
from asyncrl.errors import CheckpointError
from asyncrl.storage.best import BEST, read_best
from asyncrl.storage.checkpoints import CHECKPOINT_DIR, chosen, trained_steps
from asyncrl.telemetry.metrics.evaluations import Row
from asyncrl.telemetry.reports.summary import without


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    code: int
    """0, 1 if a role failed or an alarm stopped the run, 128 + the number of the signal that stopped it."""
    saved: bool = True
    """Whether, after a signal, the learner saved what it had trained."""
    hurried: bool = False
    """Whether a second signal arrived: nothing that takes seconds may follow."""
    trained: int = field(default=0, compare=False)
    """The last step that was shown as trained."""


def best_line(metric: str, folder: Path, rows: Sequence[Row]) -> str:
    """Return a line that names the best checkpoint by `metric`, or says that there is none."""
    best = read_best(folder / CHECKPOINT_DIR)
    if best is not None and best.metric == metric:
        return f"best checkpoint: {folder / CHECKPOINT_DIR / BEST}, of step {best.step}: {metric} {best.value:g}"
    known = {name for row in rows for name in row}
    hint = "" if metric in known else nearest(metric, known)
    return f"learner.keep_best={metric}: no checkpoint has a value of this metric.{hint}"


def named_steps(after: int, last: int) -> str:
    """Return `step 7 is`, or `steps 7 to 9 are`, of those that follow `after`."""
    return f"step {last} is" if last <= after + 1 else f"steps {after + 1} to {last} are"


def resumed_from(step: int) -> str:
    return f"resumed from step {step}" if step else "no checkpoint to resume from: the run begins at step 0"


def how_to_go_on(folder: Path, typed: Sequence[str], ended: Ended) -> str:
    """Return the command that resumes an unfinished run, and what it resumes from."""
    again, resume = shlex.join(without(typed, ("resume", "overwrite"))), "resume=auto"
    what = "stopped" if ended.code > 128 and ended.saved else "ended"
    try:
        step = trained_steps(chosen(folder, "auto"))
        saved = f"the newest checkpoint is that of step {step}" if step else "no checkpoint was saved"
        if ended.trained > step:
            saved += f"; {named_steps(step, ended.trained)} lost"
        named = [text for text in typed if text.startswith("resume=") and text not in ("resume=never", resume)]
        if named and not step:  # a fork, which with `auto` would start at step 0 from the base model
            resume = shlex.quote(named[-1])
    except CheckpointError as error:
        saved = str(error)
    return f"{what}; {saved}. Continue with:\n  {again} {resume}"
