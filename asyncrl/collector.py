"""Pauses Python's garbage collector during imports.

Imports leave almost no garbage, but the collector still walks all imported objects again and again: a fifth of the
start-up time of a process that imports torch and transformers, and again at its end. After the imports the objects are
frozen, so that later collections skip them, too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from types import ModuleType


def rest() -> None:
    """Pause the collector. Called at the start of a process, before its imports; `wake` must follow."""
    gc.disable()


def wake() -> None:
    """Freeze what was imported and start the collector again."""
    gc.freeze()
    gc.enable()


def load(module: str) -> ModuleType:
    """Import a module now: one that is slow to import and not needed by every command."""
    rest()
    try:
        return importlib.import_module(module)
    finally:
        wake()


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Pause the collector while many long-lived objects are created at once, such as a batch's headers and
    trajectories. It would take half of the time that creating them takes."""
    was_on = gc.isenabled()  # with several threads inside, the one that found it enabled enables it again
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
