"""Each alarm is provoked, and a healthy run raises none. The clock is always given."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.cli.alarms import as_markdown
from asyncrl.cli.main import main
from asyncrl.config import LOG_DIR
from asyncrl.errors import ConfigError
from asyncrl.schema import Config, RunConfig
from asyncrl.storage.lines import read_lines
from asyncrl.telemetry.folder.run_folder import STOP_FILE
from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.metrics.alarms import ALARMS, FREE_BYTES, GAP_S, WINDOW, Alarms, Stall
from asyncrl.telemetry.metrics.printed import PrintingLog
from asyncrl.telemetry.metrics.raised import ALARMS_FILE, Raised
from asyncrl.telemetry.metrics.registry import metric_of
from asyncrl.telemetry.reports.page import page_of
from tests.telemetry.reports.test_page import data_in

ROOT = Path(__file__).resolve().parents[3]
SOUND = {
    "time/step": 2.0, "reward/mean": 0.5, "reward/zero_variance_groups": 0.3, "policy/entropy": 1.0,
    "ratio/E/ess_seq": 0.9, "staleness/age_0/rms_log_ratio": 0.01, "completion/length_mean": 100.0,
    "completion/truncated": 0.05, "optim/nonfinite_steps": 0.0, "weights/canary_failed": 0.0, "replay/workers": 2.0,
    FREE_BYTES: 1 << 40, "machine/memory_free": 0.5, "machine/clock_skew_s": 0.001,
    "replay/workers_other_code": 0.0,
}  # fmt: skip
TROUBLES: dict[str, list[dict[str, Any]]] = {
    "engine_drift": [{"staleness/age_0/rms_log_ratio": 0.5}] * WINDOW,
    "canary_failed": [{"weights/canary_failed": 1.0}],
    "low_ess": [{"ratio/E/ess_seq": 0.1}] * WINDOW,
    "entropy_collapse": [{"policy/entropy": 0.001}] * WINDOW,
    "zero_variance": [{"reward/zero_variance_groups": 0.95}] * WINDOW,
    "length_runaway": [{"completion/length_mean": 900.0}] * WINDOW,
    "truncated": [{"completion/truncated": 0.9}] * WINDOW,
    "nonfinite": [{"optim/nonfinite_steps": 1.0}],
    "no_workers": [{"replay/workers": 0.0}],
    "disk": [{FREE_BYTES: 1 << 20}],
    "memory": [{"machine/memory_free": 0.02}],
    "clock": [{"machine/clock_skew_s": 4.0}],
    "other_code": [{"replay/workers_other_code": 1.0}],
}


def fed(alarms: Alarms, *changes: dict[str, Any], first: int = 1) -> list[Raised]:
    rows = [{**SOUND, "step": step, **change} for step, change in enumerate(changes, first)]
    return [raised for row in rows for raised in alarms.row(row)]


@pytest.mark.parametrize("name", TROUBLES)
def test_each_is_told_once_while_it_holds_and_again_after_it_was_over(name: str) -> None:
    alarms = Alarms()
    assert fed(alarms, *[{}] * 30) == []
    (raised,) = fed(alarms, *TROUBLES[name], first=31)
    assert raised.name == name and raised.said and 31 <= raised.step < 41
    total = name in ("nonfinite", "canary_failed")  # which stays as it is, and does not grow
    during = fed(alarms, *TROUBLES[name][-1:] * 30, first=41)
    (end,) = [*during, *fed(alarms, *[{}] * 30, first=71)]
    held = end.over or 0
    assert (9 if total else 30) <= held <= 50 and bool(during) == total
    assert f"over after {held} steps; it last held at step {raised.step + held - 1}" in str(end)
    assert end.name == name and end.step == raised.step + held + WINDOW and not end.stops
    if not total:
        assert [again.name for again in fed(alarms, *TROUBLES[name], first=101)] == [name]
    assert fed(Alarms([name]), *[{}] * 30, *TROUBLES[name]) == []


@pytest.mark.parametrize("name", ["nonfinite", "canary_failed"])
def test_what_went_wrong_before_the_first_row_is_told_with_it(name: str) -> None:
    (raised, end) = fed(Alarms(), *TROUBLES[name] * 30)
    assert (raised.name, raised.step) == (name, 1) and "grew by 1" in raised.said
    assert end.over == WINDOW
    resumed = fed(Alarms(), *TROUBLES[name] * 30, first=7)
    assert [each.name for each in resumed] == ["canary_failed"] * 2 * (name == "canary_failed"), "checkpoints keep one"


def test_one_that_comes_and_goes_at_its_limit_is_told_a_few_times() -> None:
    """Thirty times over and under in 900 steps."""
    alarms, told, ended = Alarms(), 0, 0
    for turn in range(30):
        shares = [0.95] * 12 + [0.3] * 18
        found = fed(alarms, *[{"reward/zero_variance_groups": share} for share in shares], first=1 + 30 * turn)
        told += len([raised for raised in found if raised.over is None])
        ended += len([raised for raised in found if raised.over])
    assert (told, ended) == (3, 2), "each time it is over for 23 steps: more than 10 and 20, and less than 40"


def evaluated(
    rise: float, *, half: float | None = 0.05, noise: float = 0.0, accuracies: Sequence[float] = (0.5, 0.8, 0.6, 0.6)
) -> list[str]:
    """Alarms of a run whose reward rises by so much between its evaluations, each known to `half`."""
    alarms, found = Alarms(), []
    for point, accuracy in enumerate(accuracies):
        rewards = [0.5 + rise * point + noise * (-1) ** step for step in range(WINDOW)]
        found += fed(alarms, *[{"reward/mean": reward} for reward in rewards], first=1 + WINDOW * point)
        name = "eval/heldout/accuracy"
        ends = {} if half is None else {f"{name}_low": accuracy - half, f"{name}_high": accuracy + half}
        found += alarms.row({"step": WINDOW * (point + 1), name: accuracy, **ends})
    return [raised.name for raised in found]


def test_an_evaluation_that_falls_while_the_reward_rises_looks_like_hacking() -> None:
    assert evaluated(0.1) == ["reward_hacking"]
    assert evaluated(-0.1) == []


def test_what_the_draw_of_rows_or_batches_explains_is_no_hacking() -> None:
    assert evaluated(0.1, half=0.15) == [], "the intervals meet"
    assert evaluated(0.1, half=None) == [], "of rows that do not say nothing is known"
    assert evaluated(0.01, noise=0.2) == [], "the reward rose by less than its batches differ"
    assert evaluated(0.1, noise=0.05) == ["reward_hacking"]
    assert evaluated(0.1, accuracies=(0.8, 0.75, 0.75)) == [], "less than a tenth"


def test_an_evaluation_before_there_are_batches_is_no_reward_of_nothing() -> None:
    alarms, name = Alarms(), "eval/heldout/accuracy"
    rows = [
        {"step": step, name: value, f"{name}_low": value, f"{name}_high": value}
        for step, value in ((0, 0.9), (20, 0.5), (40, 0.5))
    ]
    assert alarms.row(rows[0]) == []
    assert fed(alarms, *[{"reward/mean": 0.5}] * WINDOW) == []
    assert [raised for row in rows[1:] for raised in alarms.row(row)] == []


def test_an_evaluation_that_is_best_before_the_first_step_and_falls_is_held_against_the_first_rewards() -> None:
    alarms, name, found = Alarms(), "eval/heldout/accuracy", []
    for step, value in ((0, 0.9), (5, 0.5), (20, 0.5)):
        rewards = [{"reward/mean": 0.02 * each} for each in range(step)][-15:]
        assert fed(alarms, *rewards, first=step - len(rewards) + 1) == []
        found = alarms.row({"step": step, name: value, f"{name}_low": value, f"{name}_high": value})
    assert [raised.name for raised in found] == ["reward_hacking"] and "from 0.09 to 0.29" in found[0].said


def test_a_stall_is_a_silence_far_beyond_the_usual_step() -> None:
    stall, ignored = Stall(), Stall(["stall"])
    assert stall.silence(1e9) == [], "nothing was ever trained: starting may take long"
    rows = [{**SOUND, "time/step": 30.0, "step": step} for step in (1, 2, 3)]
    assert [raised for row in rows for each in (stall, ignored) for raised in each.row(row, float(row["step"]))] == []
    assert stall.silence(3 + GAP_S + 1) == [], "ten steps of 30 s are not over"
    (raised,) = stall.silence(3 + 301)
    assert (raised.name, raised.step) == ("stall", 3) and "301 s" in raised.said
    assert stall.silence(3 + 400) == ignored.silence(3 + 400) == []
    (over,) = stall.row({**SOUND, "time/step": 30.0, "step": 4}, 603.0)
    assert str(over) == "alarm stall at step 4: over after 600 s: a step has ended." and not over.stops
    assert stall.row({**SOUND, "time/step": 30.0, "step": 5}, 604.0) == []
    assert [again.name for again in stall.silence(604 + 301)] == ["stall"]


def test_what_a_run_lacks_raises_nothing() -> None:
    alarms = Alarms()
    rows = [{"step": step, "time/step": 1.0, "loss/total": None} for step in range(1, 50)]
    assert [raised for row in rows for raised in alarms.row(row)] == []


def test_each_has_words_a_page_and_metrics_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {alarm.name for alarm in ALARMS} == {*TROUBLES, "stall", "reward_hacking"}
    said = "run: asyncrl alarms --markdown > docs/alarms.md"
    assert (ROOT / "docs" / "alarms.md").read_text() == as_markdown(), said
    assert [name for name in SOUND if name != FREE_BYTES and metric_of(name) is None] == []
    with pytest.raises(ConfigError, match=r"nonsense.*low_ess"):
        Alarms(["nonsense"])


def test_the_learner_writes_them_down_and_asks_for_a_stop_where_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(run=RunConfig(dir=str(tmp_path)))
    (tmp_path / LOG_DIR).mkdir()
    for action in ("continue", "stop"):
        log = PrintingLog.of(config, tmp_path, 0, on_alarm=action)
        for step in range(1, WINDOW + 2):
            log.write(step, step, {**{k: v for k, v in SOUND.items() if k != FREE_BYTES}, "ratio/E/ess_seq": 0.1})
        log.close()
        (row,) = read_lines(tmp_path / ALARMS_FILE).rows
        assert (row["name"], row["step"]) == ("low_ess", WINDOW)
        assert "alarm low_ess at step 10" in capsys.readouterr().out
        assert (tmp_path / LOG_DIR / STOP_FILE).exists() == (action == "stop")
    assert FREE_BYTES not in json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])


def test_the_end_of_one_is_written_down_and_shown_in_watch_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    (folder / LOG_DIR).mkdir(parents=True)
    (folder / "config.yaml").write_text("learner:\n  steps: 99\n")
    log = PrintingLog.of(Config(run=RunConfig(dir=str(folder))), folder, 0, on_alarm="stop")
    for step in range(1, 2 * WINDOW + 6):
        workers = {"time/step": 1.0, "replay/workers": 0.0 if step in (3, 4) else 2.0}
        log.write(step, step, {**workers, "reward/zero_variance_groups": 0.95 if step > WINDOW else 0.0})
    log.close()
    end = f"alarm no_workers at step {5 + WINDOW}: over after 2 steps; it last held at step 4."
    assert end in capsys.readouterr().out
    assert main(["watch", str(folder)]) == 0
    assert end in capsys.readouterr().out
    told = [row[1:3] + row[4:5] for row in data_in(page_of([folder]))["alarms"]]
    assert told == [[3, "no_workers", 2], [2 * WINDOW - 1, "zero_variance", None]]


def test_a_resume_ends_those_that_nobody_knows_to_hold_still_and_they_are_told_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / LOG_DIR).mkdir(parents=True)
    (folder / "config.yaml").write_text("learner:\n  steps: 99\n")
    config, none = Config(run=RunConfig(dir=str(folder))), {"time/step": 1.0, "replay/workers": 0.0}
    for at, rows in ((0, 9), (4, 5), (4, 0)):
        log = PrintingLog.of(config, folder, at)
        for step in range(at + 1, at + rows + 1):
            log.write(step, step, none if step > 2 else {**none, "replay/workers": 1.0})
        log.close()
    with (folder / ALARMS_FILE).open("a") as file:
        file.write('{"step": 4, "name": ["low_ess"], "said": "of another hand"}\n')
    PrintingLog.of(config, folder, 4).close()
    told = [row[1:3] + row[4:5] for row in data_in(page_of([folder]))["alarms"]]
    assert told[0] == [3, "no_workers", 2] and len(told) == 2
    said = [row["said"] for row in read_lines(folder / ALARMS_FILE).rows]
    assert said.count("over after 2 steps: the run was resumed. If it still holds, it is reported again") == 1
    assert said[0] == "no rollout worker is connected" and len(said) == 3


def test_workers_that_are_gone_for_a_moment_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOG_DIR).mkdir()
    log = PrintingLog.of(Config(run=RunConfig(dir=str(tmp_path))), tmp_path, 0, on_alarm="stop")
    view = RunView(tmp_path, 9, Console(), 0)
    for step, workers in ((1, 0.0), (2, 1.0), (3, 0.0)):  # what a resume finds in the buffer needs none
        log.write(step, step, {"time/step": 1.0, "replay/workers": workers})
    view.refresh("training")
    log.close()
    out = capsys.readouterr().out
    assert out.count("alarm no_workers at step 3") == 2 == out.count("alarm")
    assert not view.alarmed and not (tmp_path / LOG_DIR / STOP_FILE).exists()


@pytest.mark.parametrize(("steps", "stalls"), [(9, 1), (0, 1), (3, 0)])
def test_a_run_that_has_its_steps_does_not_stall(
    steps: int, stalls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its last evaluation, or for exports."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time/step": 1.0}\n')
    said: list[str] = []
    view = RunView(tmp_path, steps, Console())
    monkeypatch.setattr(view, "say", said.append)
    view.refresh("training")
    later = time.monotonic() + 500
    monkeypatch.setattr(time, "monotonic", lambda: later)
    view.refresh("training")
    assert len(said) == stalls and all(text.startswith("alarm stall") for text in said)


def test_a_stall_is_written_down_with_the_step_that_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOG_DIR).mkdir()
    (tmp_path / "config.yaml").write_text("learner:\n  steps: 99\n")
    log, clock = PrintingLog.of(Config(run=RunConfig(dir=str(tmp_path))), tmp_path, 0, on_alarm="stop"), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for step, took in ((1, 1), (2, 1), (3, 500), (4, 1), (4, 500)):
        clock[0] += took
        evaluated = took == 500 and step == 4
        log.write(step, step, {"eval/held/reward": 0.5} if evaluated else {"time/step": 1.0})
    log.close()
    told = [(row["name"], row["step"], row["said"]) for row in read_lines(tmp_path / ALARMS_FILE).rows]
    assert told == [
        ("stall", 2, "no step has ended for 500 s; one usually takes 1.0 s"),
        ("stall", 3, "over after 500 s: a step has ended"),
    ]
    capsys.readouterr()
    assert [row[1:5] for row in data_in(page_of([tmp_path]))["alarms"]] == [[2, "stall", told[0][2], 1]]
    assert not (tmp_path / LOG_DIR / STOP_FILE).exists(), "it is over"


def test_a_resume_looks_past_damaged_lines(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", ALARMS_FILE):
        damaged = '{"step": 1, "ti\n[1]\n\0\n{"step": 1, "name": "low_ess"}\n{"step": "a"}\n{"loss/total": 1.0}\n'
        (tmp_path / name).write_text(damaged)
    for resumed in (None, 1):
        view = RunView(tmp_path, 9, Console(), resumed)
        view.refresh("training")
        assert not view.alarmed
