"""Start processes with their imports done already: importing torch alone would take each of them seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil

from tests.alive import is_alive

PATIENCE_S = 60.0
"""Limit in seconds on the wait for processes of an earlier test that were told to end."""


def forked_from(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported `modules` and done nothing else."""
    server = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    preloaded = ["tests.collector_at_rest", *modules, "tests.collector_awake"]
    if server._preload_modules != preloaded:  # pyright: ignore[reportAttributeAccessIssue]
        _wait_for_children_of(server)
        # It has imported other modules. Python's own tests stop it in this way too.
        server._stop()  # pyright: ignore[reportAttributeAccessIssue]
    context = get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    return context


def run_ranks(work: Callable[..., None], world: int, folder: Path, *modules: str) -> None:
    """Run `work(rank, world, folder)` in one process per rank; none may fail.

    Waits for the processes; unblocked by their end, or after 500 s, when they are killed.
    """
    context = forked_from(*modules)
    ranks = [context.Process(target=work, args=(rank, world, str(folder))) for rank in range(world)]
    for process in ranks:
        process.start()
    until = time.monotonic() + 500
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * world


def _wait_for_children_of(server: forkserver.ForkServer) -> None:
    """Wait for the server's children, since `_stop` would wait for them without limit.

    Waits for their end; unblocked by it or by the deadline.
    """
    pid = server._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    until = time.monotonic() + PATIENCE_S
    while alive := living_children(pid) if pid is not None else []:
        assert time.monotonic() < until, f"processes {alive} of an earlier test are still there: they were never ended"
        time.sleep(0.02)


def living_children(pid: int) -> list[int]:
    """Return the pids of the living children of process `pid`, without zombies."""
    try:
        found = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in found if is_alive(child)]
