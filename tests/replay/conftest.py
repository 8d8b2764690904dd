"""What several files of these tests stand on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from .cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    made.start()
    with contextlib.closing(made):
        yield made
