"""Reports processes that are stopped by SIGSTOP, Ctrl-Z or a debugger.

Nothing else would: a stopped process has neither failed nor ended, and whatever waits for it just keeps waiting.

consumes: states of processes · waits for: nothing; a watcher calls `StoppedProcesses.look` about once a second
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from asyncrl.utils.process_tree import STOPPED, ancestors, command_of, is_alive, status_of

log = logging.getLogger(__name__)

NAMED_S = 5.0
"""A process stopped for this long is reported; with the watcher's interval, within 10 s."""
AGAIN_S = 60.0
"""The report is repeated at this interval while it is stopped."""
TURN_S = 1.0
"""Interval between two looks of `watched_supervisors`."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    follows: str
    """What does not happen while it is stopped."""
    waits: str = ""
    """Who waits for it; empty if nobody does immediately."""


ALONE = "no process that dies is restarted, and the run is not shown"
LOCAL, SFT = Kind("asyncrl local", ALONE), Kind("asyncrl sft", ALONE)
POOL = Kind("the rollout pool", "a worker that dies is not restarted")
WORKER = Kind("a rollout worker", "its groups are made by other workers or not at all", "the learner waits")
REPLAY = Kind("the replay server", "nothing is admitted, stored or trained", "everybody waits")
TORCHRUN = Kind("torchrun", "a learner rank that dies is not restarted")
RANK = Kind("a learner rank", "no step ends", "the run waits")
SCORED = "what it scores waits"
REWARD = Kind("a reward process", "its calls fail after reward.timeout_s, and it is replaced", SCORED)

KINDS = (
    ("asyncrl.learner.torchrun", TORCHRUN),
    ("torch.distributed.run", TORCHRUN),
    ("asyncrl.rewards.child", REWARD),
    ("asyncrl.rollout --worker", WORKER),
    ("ray::RolloutWorkerActor", WORKER),
    ("ray::RewardService", Kind("the reward service", "its calls fail when they are overdue", SCORED)),
    ("ray::", Kind("a process of Ray", "Ray may start nothing")),
    ("raylet/raylet", Kind("Ray's raylet", "Ray starts nothing on this machine")),
    ("gcs/gcs_server", Kind("Ray's gcs_server", "Ray starts nothing", "Ray waits")),
    ("VLLM::", Kind("a process of vLLM", "its engine generates nothing", "its rollout worker waits")),
    ("asyncrl.learner", RANK),
    ("asyncrl.sft", RANK),
    ("asyncrl.replay", REPLAY),
    ("asyncrl.rollout", POOL),
    ("launchers/rollout.py", POOL),
    ("asyncrl local", LOCAL),
    ("asyncrl quickstart", LOCAL),
    ("asyncrl sft", SFT),
    ("asyncrl rollout", POOL),
    ("asyncrl replay", REPLAY),
    ("asyncrl learner", RANK),
)
"""Text at the start of a command line -> kind of process. The first match counts."""
HEAD = 4
"""Words of a command line that are searched. Settings follow them, and may contain names of modules."""


def kind_of(command: list[str]) -> Kind | None:
    """The kind of process that a command line starts; None if it is none of asyncrl's."""
    head = " ".join(command[:HEAD]).replace("-m asyncrl.cli ", "asyncrl ").replace("-m asyncrl ", "asyncrl ")
    return next((kind for part, kind in KINDS if part in head), None)


@dataclass(slots=True)
class _Stopped:
    since: float
    said: str
    told_at: float | None = None


class StoppedProcesses:
    """Tracks which of the given processes are stopped. Call `look` about once a second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._stopped: dict[psutil.Process, _Stopped] = {}

    def look(self, processes: Iterable[psutil.Process]) -> list[str]:
        """Messages due now: processes that have been stopped for too long, and those that run again."""
        said: list[str] = []
        now, seen = self._clock(), set(processes)
        if now - self._looked_at > NAMED_S:  # this process was stopped itself: do not blame others for that time
            for known in self._stopped.values():
                known.since += now - self._looked_at
        self._looked_at = now
        for process in [known for known in self._stopped if known not in seen]:
            del self._stopped[process]
        for process in sorted(seen, key=lambda each: each.pid):
            state = status_of(process)
            known = self._stopped.get(process)
            if state in STOPPED:
                if known is None:
                    known = self._stopped[process] = _Stopped(now, who(process))
                said += self._told(process, known, now)
            elif known is not None:
                del self._stopped[process]
                if known.told_at is not None and is_alive(process):
                    said.append(f"{known.said} (pid {process.pid}) runs again after {now - known.since:.0f} s")
        return said

    def _told(self, process: psutil.Process, known: _Stopped, now: float) -> list[str]:
        due = known.since + NAMED_S if known.told_at is None else known.told_at + AGAIN_S
        if now < due:
            return []
        known.told_at = now
        kind = kind_of(command_of(process))
        follows = f" Until then {kind.follows}." if kind else ""
        return [
            f"{known.said} (pid {process.pid}) has been stopped by a signal for {now - known.since:.0f} s. `kill "
            f"-CONT {process.pid}` continues it.{follows}"
        ]


def who(process: psutil.Process) -> str:
    """A name such as `torchrun`; for an unknown process, its command line and the known process above it."""
    command = command_of(process)
    kind = kind_of(command)
    if kind is not None:
        return kind.name
    above = (kind_of(command_of(each)) for each in ancestors(process.pid))
    owner = next((each.name for each in above if each is not None), "nobody known")
    return f"process {' '.join(command)[:80]!r} below {owner}"


def supervisors() -> list[psutil.Process]:
    """The ancestors of this process that belong to the run: torchrun, the pool, Ray's raylet, `asyncrl local`."""
    return [process for process in ancestors(os.getpid()) if kind_of(command_of(process)) is not None]


@contextmanager
def watched_supervisors(say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Within the block, a thread reports supervisors of this process that are stopped.

    consumes: states of the supervisors; waits for: the clock; unblocked by: the clock, or the end of the block.
    """
    ended, told = threading.Event(), say or (lambda text: log.warning("%s", text))

    def watch() -> None:
        above, stopped = supervisors(), StoppedProcesses()
        while above and not ended.wait(TURN_S):
            for text in stopped.look(above):
                told(text)

    thread = threading.Thread(target=watch, name="watch-supervisors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
