from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from asyncrl.telemetry.live.progress import RunView
from asyncrl.telemetry.live.tails import MetricsTail
from asyncrl.telemetry.metrics.printed import clock, format_line, who_waits

EVALUATION = {
    "step": 4,
    "policy_version": 4,
    "eval/heldout/accuracy": 0.75,
    "eval/heldout/count": 18,
    "eval/heldout/failed": 238,
    "eval/heldout/version_max": 5,
}
ROW = {
    "step": 7,
    "policy_version": 8,
    "reward/mean": 0.25,
    "staleness/mean": 1.5,
    "staleness/max": 4.0,
    "perf/trained_tokens_per_s": 1234.0,
    "idle/learner": 0.4,
    "idle/rollout": 0.05,
}


def test_one_line_says_reward_staleness_speed_and_who_waits() -> None:
    line = format_line(ROW)
    for part in ("step 7", "version 8", "reward 0.250", "staleness 1.50", "tokens/s 1234"):
        assert part in line
    assert line.endswith("learner waits for rollouts 40%")


def test_completions_without_a_reward_are_said_with_their_reasons() -> None:
    failed = {"reward/failed": 12.0, "reward/failed_raised": 10.0, "reward/failed_timed_out": 2.0}
    assert "| rewards failed 12 (raised 10, timed_out 2) |" in format_line(ROW | failed)
    assert "failed" not in format_line(ROW | {"reward/failed": 0.0})


def test_a_row_with_nothing_but_its_number_is_still_a_line() -> None:
    assert format_line({"step": 1, "policy_version": 1, "reward/mean": None}) == "step 1 | version 1"


def test_an_evaluation_is_a_line_of_its_own_that_tells_of_the_rows_in_no_mean() -> None:
    line = format_line(EVALUATION)
    assert line.startswith("step 4 | version 4 | eval heldout accuracy 0.750 (238 of 256 rows failed")
    assert line.endswith("(versions 4 to 5)")
    assert "versions" not in format_line(EVALUATION | {"eval/heldout/version_max": 4.0})
    failed = {"step": 4, "policy_version": 4, "eval/heldout/count": 0.0, "eval/heldout/failed": 8.0}
    assert "eval heldout (8 of 8 rows failed" in format_line(failed)
    assert "0.000" not in format_line(failed)


def test_the_side_that_idles_more_is_the_one_that_waits() -> None:
    assert who_waits({"idle/learner": 0.1, "idle/rollout": 0.6}) == "rollouts wait for learner 60%"
    assert who_waits({"idle/learner": 0.01, "idle/rollout": 0.02}) == "nobody waits"
    assert who_waits({}) == ""


def test_the_tail_gives_each_whole_row_once_and_none_again_that_a_resume_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.read() == [{"step": 2}]
    shorter = tmp_path / "new"
    shorter.write_text('{"step": 1}\n')
    shorter.replace(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"step": 2, "time": 2}\n')
    assert tail.read() == [{"step": 2, "time": 2}], "it was trained again"


def test_without_a_terminal_every_step_is_a_line(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "step": 8}) + "\n")
    with RunView(tmp_path, 10, Console(file=out)) as view:
        view.refresh("training")
    assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == ["step 7", "step 8"]


def test_a_start_shows_no_rows_of_one_before_it_that_saved_nothing(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with RunView(tmp_path, 10, Console(file=out), 0) as view:
        view.refresh("training")
        path.write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
        view.refresh("training")
    assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == ["step 1"]


def test_a_row_with_something_else_than_numbers_is_shown_without_it(tmp_path: Path) -> None:
    row = {"step": 1, "reward/mean": "0.5", "loss/total": [1], "kl/behavior": None, "staleness/mean": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    out = io.StringIO()
    RunView(tmp_path, 3, Console(file=out)).refresh()
    assert out.getvalue() == "step 1 | staleness 1.00\n"


def test_on_a_terminal_the_table_shows_what_the_issue_asks_for(tmp_path: Path) -> None:
    out = io.StringIO()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps(EVALUATION) + "\n")
    console = Console(file=out, force_terminal=True, width=100)
    with RunView(tmp_path, 10, console) as view:
        view.refresh("training")
    shown = out.getvalue()
    for part in ("step 7/10", "reward", "heldout", "mean 1.50", "max 4", "1,234", "learner waits for rollouts"):
        assert part in shown
    out.truncate(0)
    with RunView(tmp_path, 0, console) as view:  # nobody has said how many there are to be
        view.refresh("training")
    assert "step 7 " in out.getvalue() and "left --" in out.getvalue()


def test_a_late_evaluation_does_not_empty_the_table_or_turn_it_back(tmp_path: Path) -> None:
    out = io.StringIO()
    late = EVALUATION | {"step": 6, "eval/heldout/accuracy": 0.9, "eval/heldout/failed": 0}
    rows = (ROW, EVALUATION, late)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunView(tmp_path, 10, Console(file=out, force_terminal=True, width=120)) as view:
        view.refresh()
    assert "mean 1.50" in out.getvalue() and "step 7/10" in out.getvalue()
    assert "accuracy 0.900 at step 6, best 0.900, began at 0.750" in out.getvalue()


def test_a_reward_that_keeps_failing_is_seen_before_the_first_step(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rollout-0.log"
    log.parent.mkdir()
    log.write_text("t WARNING asyncrl.rewards.pool: of an earlier run\n")
    out = io.StringIO()
    with RunView(tmp_path, 10, Console(file=out, width=200)) as view:
        with log.open("a") as file:
            file.write("t INFO other: fine\n" + "t WARNING asyncrl.rewards.pool: [boom]\n" * 15)
            file.write("t WARNING asyncrl.rewards.pool: cut o")
        view.refresh()
        view.refresh()
    assert out.getvalue().splitlines() == ["rollout-0: [boom]"] * 10


def test_clocks_read_like_clocks() -> None:
    assert [clock(s) for s in (-1, 59, 61, 3723)] == ["0:00", "0:59", "1:01", "1:02:03"]
