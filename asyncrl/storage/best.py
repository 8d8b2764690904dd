"""The best checkpoint by a metric (`learner.keep_best`). It is kept when newer checkpoints replace older ones.

ckpt/best.json     the metric, its value, and the name of the checkpoint
ckpt/best          -> step_40: a link for people, and for resume=runs/NAME/ckpt/best
"""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyncrl.storage import sealed
from asyncrl.storage.checkpoints import left_names
from asyncrl.storage.full_disk import disk_space
from asyncrl.storage.objects import read_object

log = logging.getLogger(__name__)

BEST = "best"
BEST_FILE = "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The content of `best.json`."""

    metric: str
    mode: str
    value: float
    checkpoint: str
    """Name of its folder."""
    step: int
    """Number of trained steps."""
    version_min: int
    """Oldest policy version of the weights that were measured; `version_max` is the newest."""
    version_max: int


def read_best(folder: Path) -> Best | None:
    """Read `best.json` from a folder of checkpoints; None if there is none or it cannot be read.

    If a branch has renamed the checkpoint, its new name is returned.
    """
    try:
        values = read_object(folder / BEST_FILE)
        values["value"] = float(values["value"])
        best = Best(**values)
        there = (folder / best.checkpoint).is_dir()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if there:
        return best
    left = left_names(folder, best.checkpoint)
    return replace(best, checkpoint=left[-1]) if left else None


class BestCheckpoint:
    """The best checkpoint of one folder, by one metric; with an empty metric there is none. Used only by rank 0, on the
    training thread and on the saving thread.

    Args:
        mode: which value is better, `max` or `min`.
    """

    def __init__(self, folder: Path, metric: str = "", mode: str = "max") -> None:
        self._folder, self.metric, self._mode = folder, metric, mode
        self._asked: set[int] = set()
        """Steps whose weights are being evaluated."""
        self._early: dict[int, tuple[float, tuple[int, int]] | None] = {}
        """The step whose checkpoint is being written, and its result if that came first."""
        self.held = threading.RLock()
        """Lock, held while the best checkpoint is chosen or old ones are deleted."""

    def begin(self) -> None:
        """Check the folder after a start or a resume, and repair what a crash or a branch left incomplete.

        Also runs without a metric, because other weights may be saved under the name of the best checkpoint.
        """
        found, file = read_best(self._folder), self._folder / BEST_FILE
        if found is None and file.exists():
            log.warning(
                "%s cannot be read, or its checkpoint is gone: the search for the best one starts again from here", file
            )
            file.unlink()
            (self._folder / BEST).unlink(missing_ok=True)
        elif found is not None and (not self.metric or self._is_mine(found)):
            self._write(found)
        elif found is not None:
            was = f"{found.mode} of {found.metric}"
            log.warning(
                "the best checkpoint was %s by the %s; the search for the best by %s starts again",
                found.checkpoint,
                was,
                self.metric,
            )

    def asked(self, step: int) -> None:
        """The weights after `step` steps are being evaluated. Their checkpoint is kept until the result is there."""
        with self.held:
            self._asked.add(step)

    def saving(self, step: int) -> None:
        """The checkpoint after `step` steps is being written. A result that arrives meanwhile waits for it."""
        with self.held:
            self._early = {step: None}

    def saved(self, step: int) -> bool:
        """The checkpoint is complete. Returns whether it is now the best."""
        with self.held:
            early = self._early.pop(step, None)
            return early is not None and self.told(step, *early)

    def told(self, step: int, value: float | None, versions: tuple[int, int]) -> bool:
        """Record the result for the weights after `step`, None if it has no value. It counts only if they were saved.

        Returns:
            Whether their checkpoint is now the best.
        """
        with self.held:
            return self._told(step, value, versions)

    def _told(self, step: int, value: float | None, versions: tuple[int, int]) -> bool:
        if step in self._early and value is not None:
            self._early[step] = value, versions
            return False
        self._asked = {other for other in self._asked if other > step}
        checkpoint = self._folder / f"step_{step}"
        if value is None or not math.isfinite(value) or not checkpoint.is_dir():
            return False
        known = self._known()
        if known is not None and (value <= known.value if self._mode == "max" else value >= known.value):
            return False
        numbers = {"step": step, "version_min": versions[0], "version_max": versions[1]}
        self._write(Best(metric=self.metric, mode=self._mode, value=value, checkpoint=checkpoint.name, **numbers))
        return True

    def replaced(self, checkpoint: Path) -> None:
        """Other weights were saved under this name, so a result of the old weights no longer holds."""
        if (known := self._known()) is not None and known.checkpoint == checkpoint.name:
            (self._folder / BEST_FILE).unlink()

    def kept(self) -> set[str]:
        """Names of checkpoints that must be kept."""
        with self.held:
            known = self._known()
            return {f"step_{step}" for step in self._asked} | ({known.checkpoint} if known else set())

    def _known(self) -> Best | None:
        found = read_best(self._folder) if self.metric else None
        return found if found is not None and self._is_mine(found) else None

    def _is_mine(self, found: Best) -> bool:
        return (found.metric, found.mode) == (self.metric, self._mode)

    def _write(self, best: Best) -> None:
        """Durable before the previous best checkpoint may be deleted."""
        said = json.dumps(asdict(best)) + "\n"
        with disk_space(self._folder / BEST_FILE, len(said)):
            sealed.replace_durably(self._folder / BEST_FILE, said)
            sealed.point(self._folder / BEST, self._folder / best.checkpoint)
