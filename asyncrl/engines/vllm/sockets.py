"""Removes vLLM's unix sockets and shared memory: vLLM makes three sockets per engine and leaves them behind, and its
killed processes leave their shared memory."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from asyncrl.checks.addresses import socket_folder
from asyncrl.storage.held import PREFIX, held_folder, hold_shared, shared_by
from asyncrl.utils.process_tree import descendants

VARIABLE = "VLLM_RPC_BASE_PATH"
MEMORY = ("psm_", "vllm_dist_")
"""Name prefixes of the processes' shared memory: Python's, and vLLM's own on CPUs."""


def folder_of_sockets() -> str:
    """Return a folder whose paths leave room for a held folder, and in it a name of vLLM's."""
    return socket_folder(len(f"/{PREFIX}12345678/{uuid.uuid4()}"))


@contextlib.contextmanager
def sockets_in(kept: contextlib.ExitStack) -> Iterator[None]:
    """Let an engine that starts inside put its sockets in a folder that is removed with `kept`; if the user has set the
    location, it stays."""
    if VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = str(kept.enter_context(held_folder(folder_of_sockets())))
    try:
        yield
    finally:
        del os.environ[VARIABLE]


@contextlib.contextmanager
def memory_in(kept: contextlib.ExitStack) -> Iterator[None]:
    """Let the shared memory of processes that an engine starts inside be removed with `kept`; or, if this process is
    killed, when the next engine starts."""
    before = descendants(os.getpid())
    yield
    if found := shared_by((each.pid for each in descendants(os.getpid()) - before), MEMORY):
        hold_shared(kept.enter_context(held_folder()), found)
