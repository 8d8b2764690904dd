"""Rows of the smoke recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.quickstart.smoke_rows import write_reasoning


def test_without_reasoning_gym_its_recipe_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs reasoning-gym: pip install 'asyncrl\[gym\]'"):
        write_reasoning(tmp_path)
    assert list(tmp_path.iterdir()) == []
