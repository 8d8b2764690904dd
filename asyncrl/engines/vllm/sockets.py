"""Where vLLM's unix sockets lie, and the memory that its processes share: it makes three for each engine, and leaves
them; of the memory what its processes had when they were killed."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from asyncrl.checks.addresses import socket_folder
from asyncrl.family import descendants
from asyncrl.storage.held import PREFIX, held_folder, hold_shared, shared_by

VARIABLE = "VLLM_RPC_BASE_PATH"
MEMORY = ("psm_", "vllm_dist_")
"""How what its processes share is called: Python's shared memory, and its own on CPUs."""


def folder_of_sockets() -> str:
    """With room in the paths for a held folder, and in it a name as vLLM gives them."""
    return socket_folder(len(f"/{PREFIX}12345678/{uuid.uuid4()}"))


@contextlib.contextmanager
def sockets_in(kept: contextlib.ExitStack) -> Iterator[None]:
    """An engine that starts inside has its sockets in a folder that ends with `kept`; where the user has said where
    they go, they go there."""
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
    """What processes share that an engine starts inside is gone with `kept`, or when this process is killed, once the
    next engine starts."""
    before = descendants(os.getpid())
    yield
    if found := shared_by((each.pid for each in descendants(os.getpid()) - before), MEMORY):
        hold_shared(kept.enter_context(held_folder()), found)
