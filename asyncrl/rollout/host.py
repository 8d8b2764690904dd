"""The interface between the pool and what its workers run in: plain child processes, or Ray actors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.collector import load
from asyncrl.errors import AsyncRLError

EXIT_STOPPED, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
"""Ended normally; failed, so a restart may help; refused by a rule, so a restart cannot help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker process receives, as plain values: sent as JSON, or by Ray."""

    name: str
    restart: int
    """0 for the first start."""
    log_path: str
    run_digest: str
    config: dict[str, Any]
    """From `config_to_dict`, with local paths made absolute."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that must be set before torch is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    name: str
    code: int
    """One of EXIT_*; any other exit of the process is EXIT_FAILED."""
    how: str
    """`exit code 1`, `signal SIGKILL`, or Ray's description of a dead actor."""
    said: str = ""
    """The last line of its log, if the log may be on another machine; if empty, read it from the log."""
    log: tuple[str, ...] = ()
    """The last lines of a log on another machine."""
    elsewhere: bool = False
    """Whether it ran on another machine."""


class HostLostError(AsyncRLError, ConnectionError):
    """What the workers run on is lost.

    Args:
        mendable: whether this pool started it, and so can start it again.
    """

    def __init__(self, said: str, *, mendable: bool) -> None:
        super().__init__(said)
        self.mendable = mendable


class WorkerHost(Protocol):
    def start(self, spec: WorkerSpec) -> None:
        """Start this worker; returns before it is up."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        """Return the workers that ended since the last call; wait up to `timeout_s` for the first.

        Raises:
            HostLostError: no worker can be observed or started any more.
        """
        ...

    def close(self) -> None:
        """Stop all workers, and what the host started for itself. Bounded in time; kills what does not stop."""
        ...


def run_worker_here(spec: WorkerSpec) -> int:
    """Run `run_worker_process` in this process and return its exit code.

    A failed import is written to the worker's log, which nothing has opened yet: Ray reports only the last line of a
    traceback, without the file that imported. A missing package will still be missing at the next start.
    """
    try:
        # Late: neither the pool nor a Ray actor may load torch before the worker's environment variables are set.
        process = load("asyncrl.rollout.worker.process")
    except ImportError as error:
        log = Path(spec.log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return EXIT_REFUSED if isinstance(error, ModuleNotFoundError) else EXIT_FAILED
    return process.run_worker_process(spec)
