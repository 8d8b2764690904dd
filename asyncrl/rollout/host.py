"""The seam between the pool and what its workers run in: plain child processes, or Ray actors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from asyncrl.collector import load
from asyncrl.errors import AsyncRLError

EXIT_STOPPED, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
"""Ended as it should; failed, so that a restart may help; refused by a rule that a restart will not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All a worker process is told. Plain values: it crosses as JSON, or in Ray's own transport."""

    name: str
    restart: int
    """0 for the first start."""
    log_path: str
    run_digest: str
    config: dict[str, Any]
    """As from `config_to_dict`, local paths made absolute."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that must stand before torch is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    name: str
    code: int
    """EXIT_*; any other end of the process is EXIT_FAILED."""
    how: str
    """`exit code 1`, `signal SIGKILL`, what Ray says of a dead actor."""
    said: str = ""
    """The last line of its log, where that may lie on another machine; empty: look for it."""
    log: tuple[str, ...] = ()
    """The last lines of one that does."""


class HostLostError(AsyncRLError, ConnectionError):
    """What the workers run on is gone.

    Args:
        mendable: it was started by this pool, which can start it again.
    """

    def __init__(self, said: str, *, mendable: bool) -> None:
        super().__init__(said)
        self.mendable = mendable


class WorkerHost(Protocol):
    def start(self, spec: WorkerSpec) -> None:
        """Start this worker; returns before it is up."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        """Workers that ended since the last call; waits up to `timeout_s` for the first.

        Raises:
            HostLostError: none of them can be heard of or started any more.
        """
        ...

    def close(self) -> None:
        """Stop every worker and what the host started for itself. Bounded; kills what does not stop."""
        ...


def run_worker_here(spec: WorkerSpec) -> int:
    """`run_worker_process` in this process; its exit code.

    What cannot be imported is told in the worker's log, which nothing else has opened yet: Ray passes on the last line
    of a traceback alone, without the file that asked. A package that is not there is not there for the next start.
    """
    try:
        process = late_import("worker.process")
    except ImportError as error:
        log = Path(spec.log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return EXIT_REFUSED if isinstance(error, ModuleNotFoundError) else EXIT_FAILED
    return process.run_worker_process(spec)


def late_import(module: str) -> ModuleType:
    """`asyncrl.rollout.<module>`, imported now.

    The one dynamic import: a run on plain processes must not load Ray (0.5 s, 60 MB), and neither the pool nor a Ray
    actor may load torch before the worker's environment variables are set.
    """
    return load(f"asyncrl.rollout.{module}")
