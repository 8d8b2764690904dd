"""Run many seeds of one test in two processes: a machine that runs the tests has at least two cores."""

from __future__ import annotations

import importlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

PROCESSES = 2


def _run(place: str, settings: dict[str, Any], seeds: range) -> None:
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(module), name)
    for seed in seeds:
        function(seed, **settings)


def run_seeds(place: str, seeds: range, **settings: Any) -> None:
    """Call the function at `place` with every seed. The first exception is raised here.

    Args:
        place: `module:name`, importable in another process, which pytest's own module names are not.
    """
    # Spawned, not forked: the threads that other tests left in this process would be missing in the children.
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_run, place, settings), [seeds[i::PROCESSES] for i in range(PROCESSES)]))
