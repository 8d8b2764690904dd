from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from asyncrl.sandbox.level import Level
from asyncrl.sandbox.running import run, unavailable
from tests.chaos.hostile import SECRET, Outside, main


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("level", "count"), [(Level.NAMESPACES, 20), (Level.RLIMITS, 10)], ids=lambda value: str(value)
)
def test_hostile_programs_and_rewards_stall_nothing_leave_nothing_and_are_never_scored_by_failing(level, count):
    if why := unavailable(level):
        pytest.skip(why)

    assert {name: found for name, found in main(count, 7, level, 2).faults().items() if found} == {}


def test_what_escapes_would_be_seen():
    with tempfile.TemporaryDirectory() as folder:
        outside = Outside(Path(folder))
        try:
            assert list(outside.faults()) == []
            socket.create_connection(("127.0.0.1", outside.port)).close()
            outside.folder.mkdir()
            outside.secret.write_text("changed")
            outside.close()
            assert list(outside.faults()) == ["1 connections", "a file outside", "the secret is changed"]
        finally:
            outside.close()


def test_limits_alone_keep_no_secret(tmp_path: Path):
    """So the harness looks for one, and that it is not found with namespaces says something."""
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)

    assert SECRET in run(f"print(open('{secret}').read())", level=Level.RLIMITS).stdout
