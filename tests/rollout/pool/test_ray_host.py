from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout.pool import ray_host
from asyncrl.rollout.pool.nodes import lacking_room
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


@pytest.mark.parametrize(
    ("gpus", "workers", "each", "says"),
    [
        ([8.0], 2, 4.0, ""),
        ([8.0, 0.0], 3, 4.0, "room for 2 of rollout.workers=3: each needs 4 GPU(s) on one machine"),
        (
            [6.0, 3.0],
            2,
            4.0,
            "have 6, 3. The others wait for machines that join; rollout.workers=1 fits",
        ),
        ([2.0, 3.0], 1, 4.0, "workers of 2 would fit now"),
        ([0.0], 1, 1.0, "engine.device=cpu, with ray.gpus_per_worker=0, needs none"),
        ([2.0], 5, 0.4, "room for 4 of"),  # two on each of its GPUs
        ([2.0], 4, 0.4, ""),
        ([0.0], 9, 0.0, ""),
    ],
)
def test_a_cluster_with_too_few_gpus_is_told_with_what_would_fit(
    gpus: list[float], workers: int, each: float, says: str
) -> None:
    said = lacking_room(gpus, workers, each)
    assert (says in said) if says else not said
