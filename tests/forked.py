"""Processes that begin with what they need already imported: torch alone takes seconds in each of them."""

from __future__ import annotations

from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext


def forked_from(*modules: str) -> ForkServerContext:
    """A context whose processes are forked from one that has imported `modules` and done nothing else."""
    server = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._preload_modules != list(modules):
        server._stop()  # It has imported something else; as Python's own tests do it.
    context = get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context
