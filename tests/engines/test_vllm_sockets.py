"""Where a vLLM engine makes its sockets; `tests/vllm/test_verify.py` checks that a real one leaves none."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from asyncrl.engines.vllm.sockets import VARIABLE, folder_of_sockets, sockets_in


def test_they_lie_in_a_folder_of_their_own_that_ends_with_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("asyncrl.engines.vllm.sockets.folder_of_sockets", lambda: str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    with ExitStack() as engine:
        with sockets_in(engine):
            folder = Path(os.environ[VARIABLE])
            (folder / "socket").touch()
        assert folder.parent == tmp_path and folder.exists()
        assert VARIABLE not in os.environ  # the next engine has its own
    assert not list(tmp_path.iterdir())


def test_where_the_user_has_said_where_they_go_there(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with ExitStack() as engine, sockets_in(engine):
        assert os.environ[VARIABLE] == str(tmp_path)
    assert os.environ[VARIABLE] == str(tmp_path) and tmp_path.exists()


@pytest.mark.parametrize(("usual", "expected"), [("/short", "/short"), ("/long" * 10, "/tmp")])
def test_they_lie_where_their_paths_have_room(usual, expected, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", usual)
    assert folder_of_sockets() == expected
