"""Fixtures that several files of the replay's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.replay.server import loop
from tests.replay.helpers import replay_config, running_server, settings
from tests.replay.lives import Server
from tests.replay.served import Run


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look at the time, and whether they are to end, each so many seconds."""
    monkeypatch.setattr(loop, "TICK_S", 0.02)


@pytest.fixture
def run() -> Iterator[Run]:
    config = replay_config()
    with running_server(config, settings()):
        made = Run(config)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(**getattr(request, "param", {}))
    made.start()
    try:
        yield made
    finally:
        made.close()
