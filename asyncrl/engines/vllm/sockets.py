"""Where vLLM's unix sockets lie: it makes three for each engine, and leaves them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

from asyncrl.checks.addresses import socket_folder
from asyncrl.storage.held import PREFIX, held_folder

VARIABLE = "VLLM_RPC_BASE_PATH"


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
