"""`learner.profile=FIRST:LAST`: traces train steps with torch's profiler."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)


def steps_of(setting: str) -> range:
    """Train steps to profile, counted from 1 as in metrics; none for an empty setting. Raises ValueError."""
    if not setting:
        return range(0)
    first, last = map(int, setting.split(":"))
    if not 1 <= first <= last:
        raise ValueError(setting)
    return range(first, last + 1)


class Profile:
    """A trace of some steps, for chrome://tracing or Perfetto; on a GPU also of its memory, for
    pytorch.org/memory_viz."""

    def __init__(self, setting: str, run_dir: Path, rank: int, device: torch.device) -> None:
        self._steps, self._device = steps_of(setting), device
        self._folder, self._rank = run_dir / "profile", rank
        self._open: profile | None = None
        self._first = 0

    def begin(self, step: int) -> None:
        """Call before a step. A run that resumes within the range starts its trace there."""
        if self._open is not None or step not in self._steps:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._first = step
        self._open = profile(activities=activities, record_shapes=True)
        self._open.start()

    def end(self, step: int, *, last: bool) -> None:
        """Call after a step. After the last step of the range, or of the run, the files are written, named by the steps
        in them. A run that ended within the range and was resumed has two traces."""
        if self._open is None or not (last or step == self._steps[-1]):
            return
        done, self._open = self._open, None
        done.stop()
        step = max(step, self._first)  # asked to stop during the first step
        trace = self._folder / f"steps_{self._first}_{step}_rank_{self._rank}.json"
        try:
            trace.parent.mkdir(exist_ok=True)
            done.export_chrome_trace(str(trace))
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(trace.with_suffix(".pickle")))
        except (OSError, RuntimeError) as error:  # not a reason to end the run
            log.warning("the profile could not be written to %s: %s", trace, error)
        else:
            log.info("profile of steps %d to %d: %s", self._first, step, trace)
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
