"""Placement by Ray of workers whose engine has several processes: each has a place of its own, kept over restarts."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from asyncrl.config import config_to_dict, load_config
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.rollout.host import EXIT_REFUSED, WorkerExit, WorkerSpec
from asyncrl.rollout.pool import ray_host
from asyncrl.rollout.pool.ray_host import RayHost
from asyncrl.rollout.pool.specs import worker_environment
from tests.replay.helpers import replay_config, running_server, settings
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(500)]


def hopeless(folder: Path, index: int) -> WorkerSpec:
    """A worker that ends at once: its model does not exist."""
    config = load_config([f"model.path={folder / 'none'}", "data.path=d.jsonl", "reward.function=r.py:f"])
    return WorkerSpec(
        name=f"rollout-{index}", restart=0, log_path=str(folder / f"{index}.log"), run_digest="",
        config=config_to_dict(config), environment=worker_environment(config),
    )  # fmt: skip


def ends(host: RayHost, count: int) -> list[WorkerExit]:
    found: list[WorkerExit] = []
    deadline = time.monotonic() + 200
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += host.wait(0.5)
    return found


def places() -> list[tuple[str, str, str, dict]]:
    """(id, state, strategy, resources of its one bundle) of all that were ever made."""
    rows = placement_group_table().values()
    assert all(len(row["bundles"]) == 1 for row in rows)
    return [(row["placement_group_id"], row["state"], row["strategy"], row["bundles"][0]) for row in rows]


def test_every_worker_of_two_processes_keeps_one_place_for_both_on_one_machine_through_restarts(tmp_path):
    host = RayHost(address="", workers=2, gpus_per_worker=lambda _: 0.0, processes_per_worker=2)
    try:
        specs = [hopeless(tmp_path, index) for index in range(2)]
        for spec in specs:
            host.start(spec)
        ended = ends(host, 2)
        assert [found.code for found in ended] == [EXIT_REFUSED] * 2
        assert all("none" in found.said for found in ended), "what the log says, wherever it is"
        before = places()
        assert [place[1:] for place in before] == [("CREATED", "STRICT_PACK", {"CPU": 2.0})] * 2
        host.start(specs[0])
        ends(host, 1)
        assert sorted(places()) == sorted(before)
        assert ray.available_resources().get("CPU", 0.0) == 0.0, "nobody else gets what is kept for them"
    finally:
        host.close()
    assert not ray.is_initialized()


def test_workers_are_ended_in_order_and_not_killed(tmp_path):
    """Ray kills actors: an engine that closes nothing leaves shared memory and sockets behind."""
    save_byte_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "r.py").write_text("def f(prompts, completions, **rows):\n    return [0.0 for _ in completions]\n")
    config = load_config([
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", f"reward.function={tmp_path}/r.py:f",
        "engine=fake", f"run.dir={tmp_path}",
    ])  # fmt: skip
    config.replay = replay_config()
    spec, log = replace(hopeless(tmp_path, 0), config=config_to_dict(config), run_digest="d"), tmp_path / "0.log"
    host = RayHost(address="", workers=1, gpus_per_worker=lambda _: 0.0)
    with running_server(config.replay, settings()), contextlib.closing(host):
        host.start(spec)
        ready = "the engine is ready"
        until(
            lambda: log.exists() and ready in log.read_text(),
            log.read_text,
            within_s=200,
            holds=lambda: not host.wait(0.5),
        )
    assert log.read_text().rstrip().endswith("ended by a signal")


def test_ray_begins_where_temporary_files_have_a_long_path(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    with pytest.raises(ConfigError, match=f"107 bytes.* RAY_TMPDIR={folder} is the folder"):
        RayHost(address="", workers=1, gpus_per_worker=lambda _: 0.0)
    monkeypatch.delenv("RAY_TMPDIR")
    RayHost(address="", workers=1, gpus_per_worker=lambda _: 0.0).close()


def test_a_worker_without_a_place_is_named_with_what_it_asks_for_and_given_up_when_nobody_has_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ray_host, "PLACE_TOLD_S", 1.0)
    host = RayHost(address="", workers=1, gpus_per_worker=lambda _: 8.0, patience_s=4.0)
    try:
        host.start(hopeless(tmp_path, 0))
        (found,) = ends(host, 1)
    finally:
        host.close()
    assert found.code == EXIT_REFUSED and "needs 8 GPUs" in found.how and "replay.wait_timeout_s" in found.how
    assert "worker rollout-0: Ray has found no place for it in" in capsys.readouterr().err
