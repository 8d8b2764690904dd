"""Runs workers as plain child processes: `python -m asyncrl.rollout --worker`, with the spec on standard input."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, WorkerExit, WorkerSpec
from asyncrl.schema import Config
from asyncrl.utils.process_tree import describe_exit

STOP_TIMEOUT_S = 10.0


class ProcessHost:
    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._reapers: dict[str, threading.Thread] = {}
        self._exits: queue.Queue[WorkerExit] = queue.Queue()

    def start(self, spec: WorkerSpec) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.rollout", "--worker"],
            stdin=subprocess.PIPE,
            env={**os.environ, **spec.environment},
            # Ctrl-C reaches only the pool, which then stops its workers in order.
            start_new_session=True,
        )
        self._processes[spec.name] = process
        reaper = threading.Thread(target=self._reap, args=(spec.name, process), daemon=True)
        self._reapers[spec.name] = reaper
        reaper.start()
        assert process.stdin is not None
        try:
            # The pipe stays open: a worker learns from its end that the pool died.
            process.stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # died at once: its reaper reports it
            pass

    def wait(self, timeout_s: float) -> list[WorkerExit]:
        exits: list[WorkerExit] = []
        try:
            exits.append(self._exits.get(timeout=timeout_s))
            while True:
                exits.append(self._exits.get_nowait())
        except queue.Empty:
            return exits

    def close(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for name, reaper in self._reapers.items():
            reaper.join(max(0.0, deadline - time.monotonic()))
            if reaper.is_alive():
                _signal(self._processes[name], signal.SIGKILL)
                reaper.join()
        self._processes.clear()
        self._reapers.clear()

    def _reap(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """consumes: nothing; waits for: the end of this process, however long the run is; unblocked by: its end."""
        # Before the pid is reaped: processes that an environment started in its group must not outlive it.
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if process.stdin is not None:
            process.stdin.close()
        known = code if code in (EXIT_STOPPED, EXIT_REFUSED) else EXIT_FAILED
        self._exits.put(WorkerExit(name=name, code=known, how=describe_exit(code)))


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def make_host(config: Config) -> ProcessHost:
    return ProcessHost()
