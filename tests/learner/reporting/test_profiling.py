from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.learner.reporting.profiling import Profile, steps_of

CPU = torch.device("cpu")


def work_through(profile: Profile, steps: range) -> None:
    for step in steps:
        profile.begin(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(3).sum()
        profile.end(step, last=step == steps[-1])


def names_in(folder: Path) -> set[str]:
    (trace,) = (folder / "profile").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if event["name"].startswith("step ")}


@pytest.mark.parametrize(
    ("ran", "seen"), [(range(1, 7), (2, 3)), (range(3, 7), (3,)), (range(1, 3), (2,))], ids=["all", "resumed", "ended"]
)
def test_a_trace_holds_the_steps_that_were_asked_for_and_no_others(tmp_path: Path, ran: range, seen: tuple[int, ...]):
    work_through(Profile("2:3", tmp_path, 0, CPU), ran)
    assert names_in(tmp_path) == {f"step {step}" for step in seen}


def test_a_run_that_is_resumed_among_the_steps_keeps_the_trace_of_before(tmp_path: Path):
    work_through(Profile("2:4", tmp_path, 0, CPU), range(1, 3))
    work_through(Profile("2:4", tmp_path, 0, CPU), range(3, 7))
    traces = {path.name for path in (tmp_path / "profile").iterdir()}
    assert traces == {"steps_2_2_rank_0.json", "steps_3_4_rank_0.json"}


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "profile").write_text("in the way")
    work_through(Profile("1:1", tmp_path, 0, CPU), range(1, 3))
    assert "could not be written" in caplog.text


def test_nothing_is_profiled_unless_asked(tmp_path: Path):
    work_through(Profile("", tmp_path, 0, CPU), range(1, 3))
    assert not list(tmp_path.iterdir())
    assert steps_of("10:13") == range(10, 14)
