from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.pool import ray_host
from asyncrl.rollout.pool.ray_host import RayHost, give_token


@pytest.mark.parametrize(
    ("home", "given"), [("good", False), ("good/new/er", False), ("file", True), ("file/under", True)]
)
def test_a_ray_of_our_own_has_a_token_where_no_home_folder_can_keep_one(
    home: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "good").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    give_token()
    token = os.environ.pop("RAY_AUTH_TOKEN", "")
    assert (len(token) == 64) == given, "else Ray writes its own"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    give_token()
    assert "RAY_AUTH_TOKEN" not in os.environ, "what the user chose stays"


@pytest.mark.parametrize(
    "raised", [OSError("[Errno 28] no space"), Exception("The current node timed out during startup.")]
)
def test_a_ray_that_does_not_start_says_where_its_logs_are_and_what_needs_none(
    raised: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_host.ray, "init", init)
    with pytest.raises(ConfigError) as refused:
        RayHost(address="", workers=1, gpus_per_worker=lambda gpus: 0.0)
    assert all(part in str(refused.value) for part in (str(raised), str(tmp_path), "rollout.host=process"))
