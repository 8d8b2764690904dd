"""Fixtures of the tests of weights."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def refusing() -> Iterator[list[Any]]:
    """The place of a member of a `StreamWire` that refuses connections: nobody else gets its port meanwhile."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield ["127.0.0.1", silent.getsockname()[1], "", "", ""]
