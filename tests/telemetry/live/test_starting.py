from __future__ import annotations

from pathlib import Path

from asyncrl.telemetry.live.starting import StartWatch


def test_who_is_waited_for_is_named_until_its_log_says_that_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "learner.log").write_text("INFO: 1 ranks on cpu, from step 0\n")  # of an earlier run
    watch = StartWatch(tmp_path, ["replay", "rollout", "learner"])
    assert watch.news() == []
    assert watch.state() == (
        "starting, waiting for replay (reading its journal), rollout (loading the engine), learner (loading the model)"
    )
    (tmp_path / "replay.log").write_text("INFO: replay server of run r listens on tcp://127.0.0.1:5\n")
    (tmp_path / "rollout.log").write_text("")
    (tmp_path / "rollout-0.log").write_text("INFO: the engine is ready\n")
    assert [line.rpartition(" (")[0] for line in watch.news()] == ["replay listens", "rollout has its engine"]
    assert watch.state() == "starting, waiting for learner (loading the model)"
    with (tmp_path / "learner.log").open("a") as log:
        log.write("INFO: 2 ranks on cpu, from step 7\n")
    assert [line.rpartition(" (")[0] for line in watch.news()] == ["learner has its model"]
    assert watch.news() == [] and watch.state() == "starting, waiting for the first step"
