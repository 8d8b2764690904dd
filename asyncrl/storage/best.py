"""The best checkpoint by a metric (`learner.keep_best`), which stays when the newest push the others out.

ckpt/best.json     what it is: the metric, its value, the checkpoint's name
ckpt/best          -> step_40: the same for people, and for resume=runs/NAME/ckpt/best
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
from asyncrl.storage.full_disk import Patience
from asyncrl.storage.objects import read_object

log = logging.getLogger(__name__)

BEST = "best"
BEST_FILE = "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What `best.json` holds."""

    metric: str
    mode: str
    value: float
    checkpoint: str
    """Its folder's name."""
    step: int
    """Trained steps."""
    version_min: int
    """The weights that were measured: from this policy_version ..."""
    version_max: int


def read_best(folder: Path) -> Best | None:
    """Of a folder of checkpoints; None where there is none, or `best.json` cannot be read.

    One that a branch has left is found under its new name.
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
    """Of one folder, by one metric; with an empty metric there is none. Used by rank 0 alone, on the thread that trains
    and on the one that saves.

    Args:
        mode: `max` or `min`: which value is better.
        patience: with a full disk.
    """

    def __init__(self, folder: Path, metric: str = "", mode: str = "max", patience: Patience | None = None) -> None:
        self._folder, self.metric, self._mode = folder, metric, mode
        self._patience = patience or Patience()
        self._asked: set[int] = set()
        """Steps whose weights are being measured."""
        self._early: dict[int, tuple[float, tuple[int, int]] | None] = {}
        """Of a step whose checkpoint is being written: the result that came before it was whole."""
        self.held = threading.RLock()
        """By whom decides what is best, or what goes."""

    def begin(self) -> None:
        """After a start, or a resume: what lies there is said, and mended where a death or a branch left it half.

        Without a metric too: other weights may be saved under the name of the best.
        """
        found, file = read_best(self._folder), self._folder / BEST_FILE
        if found is None and file.exists():
            log.warning("%s cannot be read, or its checkpoint is gone: the best is looked for anew from here on", file)
            file.unlink()
            (self._folder / BEST).unlink(missing_ok=True)
        elif found is not None and (not self.metric or self._is_mine(found)):
            self._write(found)
        elif found is not None:
            was = f"{found.mode} of {found.metric}"
            log.warning(
                "the best checkpoint was %s by the %s; by %s it begins anew", found.checkpoint, was, self.metric
            )

    def asked(self, step: int) -> None:
        """The weights after so many steps are being measured: their checkpoint stays until the result is there."""
        with self.held:
            self._asked.add(step)

    def saving(self, step: int) -> None:
        """The checkpoint after so many steps is being written: a result that comes meanwhile waits for it."""
        with self.held:
            self._early = {step: None}

    def saved(self, step: int) -> bool:
        """It is whole. Returns whether it is the best now."""
        with self.held:
            early = self._early.pop(step, None)
            return early is not None and self.told(step, *early)

    def told(self, step: int, value: float | None, versions: tuple[int, int]) -> bool:
        """A result for the weights after `step`; None: it has no value. Counts where they were saved.

        Returns:
            Whether their checkpoint is the best now.
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
        """Other weights were saved under this name: what is known of the old ones does not hold for them."""
        if (known := self._known()) is not None and known.checkpoint == checkpoint.name:
            (self._folder / BEST_FILE).unlink()

    def kept(self) -> set[str]:
        """Names of checkpoints that must stay."""
        with self.held:
            known = self._known()
            return {f"step_{step}" for step in self._asked} | ({known.checkpoint} if known else set())

    def _known(self) -> Best | None:
        found = read_best(self._folder) if self.metric else None
        return found if found is not None and self._is_mine(found) else None

    def _is_mine(self, found: Best) -> bool:
        return (found.metric, found.mode) == (self.metric, self._mode)

    def _write(self, best: Best) -> None:
        """Durable before the one that was best before may go."""
        said = json.dumps(asdict(best)) + "\n"

        def write() -> None:
            sealed.replace_durably(self._folder / BEST_FILE, said)
            sealed.point(self._folder / BEST, self._folder / best.checkpoint)

        self._patience.through(self._folder / BEST_FILE, len(said), write)
