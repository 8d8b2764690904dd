"""Python's garbage collector rests while a process imports what it needs.

Imports leave next to no garbage, and a collection for every so many new objects goes through all that were imported
before: a fifth of the time in which a process with torch and transformers begins, and again when it ends. Afterwards
what is there stays, as modules do, and no later collection goes through it either.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from types import ModuleType


def rest() -> None:
    """At the head of a process of ours, before its imports; `wake` is to follow."""
    gc.disable()


def wake() -> None:
    """After them."""
    gc.freeze()
    gc.enable()


def load(module: str) -> ModuleType:
    """The module of this name, imported now: what is heavy and not needed by every command, or not yet."""
    rest()
    try:
        return importlib.import_module(module)
    finally:
        wake()


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """While much is made at once that stays: of a batch's headers and trajectories the collector would look through the
    first ones again with every few hundred more, for half of the time that it takes to make them."""
    was_on = gc.isenabled()  # of several threads the one that found it so puts it on again
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
