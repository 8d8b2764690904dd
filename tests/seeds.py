"""Many seeds of one test in two processes: the machine that runs the tests has at least two cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

PROCESSES = 2


def _run(function: Callable[[int], Any], seeds: range) -> None:
    for seed in seeds:
        function(seed)


def run_seeds(function: Callable[[int], Any], seeds: range) -> None:
    """Call `function` (a module's own, or a partial of one) with every seed; the first exception is raised here."""
    # Spawned, not forked: the threads that other tests left in this process would be missing in the children.
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_run, function), [seeds[i::PROCESSES] for i in range(PROCESSES)]))
