"""A Ray that has failed is named, however it failed; a real one is killed in tests/integration/test_deaths.py."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.rollout.host import HostLostError
from asyncrl.rollout.pool import ray_health
from asyncrl.rollout.pool.ray_health import RayHealth

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ALIVE = {"Alive": True, "NodeManagerAddress": "10.0.0.1"}
DEAD = {"Alive": False, "NodeManagerAddress": "10.0.0.2"}


def loss(health: RayHealth) -> HostLostError:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            health.check()
        except HostLostError as error:
            return error
        time.sleep(0.02)
    pytest.fail("nobody noticed")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayHealth]]:
    made: list[RayHealth] = []

    def watch(nodes: Callable[[], list[dict[str, object]]], address: str = "auto") -> RayHealth:
        monkeypatch.setattr(ray_health.ray, "nodes", nodes)
        monkeypatch.setattr(ray_health, "ASK_S", 0.02)
        made.append(RayHealth(address))
        return made[-1]

    yield watch
    for health in made:
        health.close()


def test_a_cluster_with_a_dead_node_goes_on_and_one_without_a_living_one_is_lost(watched) -> None:
    nodes = [ALIVE, DEAD]
    health = watched(lambda: nodes)
    time.sleep(0.2)
    health.check()
    nodes = [DEAD]
    error = loss(health)
    assert "ray.address=auto: every node of the Ray cluster is dead (10.0.0.2)" in str(error)
    assert not error.mendable


def test_a_node_that_comes_or_goes_is_told_once(watched) -> None:
    first, second = ALIVE | {"NodeID": "a"}, {"NodeID": "b", "NodeManagerAddress": "10.0.0.2"}
    nodes, said = [first, {"NodeID": "old", "Alive": False}], []
    health = watched(lambda: nodes)

    def hears(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(said) < count and time.monotonic() < deadline:
            said.extend(health.news())
            time.sleep(0.02)

    time.sleep(0.2)
    nodes = [*nodes, second | {"Alive": True}]
    hears(1)
    nodes = [*nodes[:-1], second | {"Alive": False}]
    hears(2)
    time.sleep(0.2)
    assert [*said, *health.news()] == [
        "node 10.0.0.2 of the Ray cluster has joined",
        "node 10.0.0.2 of the Ray cluster is gone, and what ran there starts again on other nodes",
    ]
    health.check()


def test_a_head_that_does_not_answer_is_lost_and_the_cluster_is_named(watched, monkeypatch) -> None:
    monkeypatch.setattr(ray_health, "SILENCE_S", 0.5)
    ended = threading.Event()

    def nodes() -> list[dict[str, object]]:
        ended.wait(30)
        return [ALIVE]

    error = loss(watched(nodes, "10.0.0.1:6379"))
    ended.set()
    assert "ray.address=10.0.0.1:6379: the head of the Ray cluster (gcs_server) has not answered" in str(error)


def test_questions_that_fail_are_no_answers(watched, monkeypatch) -> None:
    monkeypatch.setattr(ray_health, "SILENCE_S", 0.5)

    def nodes() -> list[dict[str, object]]:
        raise ConnectionError("no head")

    assert "has not answered" in str(loss(watched(nodes)))


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_server_of_our_own_that_died_is_a_loss_that_can_be_mended(watched, tmp_path: Path, name: str) -> None:
    program = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / name)
    with subprocess.Popen([program, "600"]) as server:
        deadline = time.monotonic() + 60
        while psutil.Process(server.pid).cmdline() != [str(program), "600"]:  # the kernel does not tell it at once
            assert time.monotonic() < deadline
            time.sleep(0.01)
        health = watched(lambda: [ALIVE], "")
        health.check()
        server.kill()  # a zombie until it is waited for, as Ray leaves it
        error = loss(health)
        assert f"{name} (pid {server.pid}) of the Ray that this pool had started is gone" in str(error)
        assert error.mendable
