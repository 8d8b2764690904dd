"""Every listening socket of a running `asyncrl local`."""

from __future__ import annotations

import pytest

from tests.integration.conftest import LocalRun, StartLocal
from tests.sockets import Listener, listeners, tree

pytestmark = [pytest.mark.slow, pytest.mark.unhurried, pytest.mark.timeout(600)]


def watched(run: LocalRun, step: int, timeout_s: float = 400.0) -> set[Listener]:
    """Whatever listened from the start until `step` was trained: some sockets live for a moment only."""
    found: set[Listener] = set()

    def trained() -> bool:
        found.update(listeners(tree(run.process.pid)))
        return any(row["step"] >= step for row in run.rows())

    run.until(trained, f"step {step} was not reached", timeout_s)
    return found | listeners(tree(run.process.pid))


def assert_all_on_loopback(found: set[Listener], expected: list[str]) -> None:
    """Args: expected: parts of the command lines of those that must be among them."""
    for part in expected:
        assert any(part in each.process for each in found), f"{part!r} was not among {found}"
    beyond = {each for each in found if not each.on_loopback}
    assert not beyond, beyond


def test_nothing_of_a_local_run_listens_beyond_loopback(start_local: StartLocal) -> None:
    """Of plain processes; those of Ray and of vLLM are looked at in test_vllm.py."""
    settings = {"learner.steps": 200, "learner.ranks": 2, "rollout.workers": 2, "eval.every": 2, "eval.rows": 16}
    run = start_local(settings | {"rollout.host": "process"})
    roles = ["-m asyncrl.replay ", "-m asyncrl.learner.torchrun", "-m asyncrl.learner "]
    assert_all_on_loopback(watched(run, step=4), roles)
