"""`asyncrl report`: the page has the content of the files, and makes no network requests."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.cli.main import main
from asyncrl.telemetry.reports import compared
from asyncrl.telemetry.reports.page import POINTS, SAMPLES, TEMPLATE, curve_of, page_of


def make_run(folder: Path, rows: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {len(rows)}\nlearner:\n  lr: 0.1\n")
    for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples or [])):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def some_rows(steps: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    names = ("reward/mean", "loss/total", "staleness/hist_0", "rewards/own")
    rows: list[dict[str, Any]] = [
        {"step": step, "time": 1.0 * step, "policy_version": step, **dict(zip(names, rng.normal(0, 1, 4), strict=True))}
        for step in range(1, steps + 1)
    ]
    rows[3]["loss/total"] = None
    return [*rows, {"step": steps, "time": 9e9, "eval/heldout/accuracy": 0.625, "eval/heldout/count": 8}]


def data_in(page: str) -> dict[str, Any]:
    """As a browser takes it: all up to the first end of a script."""
    begin = page.index('<script type="application/json" id="data">')
    return json.loads(page[page.index(">", begin) + 1 : page.index("</script>", begin)])


def test_every_number_of_a_page_is_one_of_the_file(tmp_path: Path) -> None:
    first, second = some_rows(50, 0), some_rows(7, 1)
    data = data_in(page_of([make_run(tmp_path / "a", first), make_run(tmp_path / "b", second)]))
    for place, rows in enumerate((first, second)):
        names = {name for row in rows for name in row} - {"step", "time", "policy_version"}
        assert names <= set(data["curves"])
        for name in names:
            known = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            curve = data["curves"][name][place]
            assert list(zip(curve["x"], curve["y"], strict=True)) == known
    assert [run["steps"] for run in data["runs"]] == [50, 7]
    ends = {row["metric"]: row["ends"] for row in data["ends"]}
    mean = statistics.fmean(row["reward/mean"] for row in first[45:50])
    assert ends["reward/mean"][0]["value"] == mean and ends["reward/mean"][0]["last"] == first[49]["reward/mean"]
    assert ends["eval/heldout/accuracy"][0] == {
        "value": 0.625, "last": 0.625, "step": 50, "interval": None, "best": False,
    }  # fmt: skip
    assert data["settings"] == [["seed", "51", "8"]]
    assert data["metrics"]["reward/mean"]["unit"] == "reward"
    assert all(metric["unit"] for metric in data["metrics"].values())


def test_a_long_curve_loses_no_spike_and_keeps_its_last_value() -> None:
    steps = list(range(1, 10_001))
    values = [float(each) for each in np.random.default_rng(0).normal(0, 1, 10_000)]
    values[1234], values[8765] = 1e3, -1e3
    curve = curve_of(steps, values)
    assert len(curve["x"]) == len(curve["low"]) == len(curve["high"]) == len(curve["y"]) == POINTS
    assert max(curve["high"]) == 1e3 and min(curve["low"]) == -1e3
    assert curve["x"][-1] == 10_000 and curve["y"][-1] == pytest.approx(values[-1], rel=1e-5)
    begin = 0
    for end, low, high, last in zip(*(curve[key] for key in ("x", "low", "high", "y")), strict=True):
        part = values[begin : int(end)]
        assert (low, high, last) == pytest.approx((min(part), max(part), part[-1]), rel=1e-5)
        begin = int(end)


def test_an_evaluation_has_its_interval_around_it_however_many_there_are(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "time": 0.0, "eval/held/reward": 0.5}]
    for step in range(1, 1001):
        ends = {"eval/held/reward_low": step / 2, "eval/held/reward_high": 2.0 * step}
        rows.append({"step": step, "time": 0.0, "eval/held/reward": 1.0 * step} | ends)
    few, many = make_run(tmp_path / "few", rows[:50]), make_run(tmp_path / "many", rows)
    data = data_in(page_of([few, many]))
    known, drawn = data["curves"]["eval/held/reward"]
    assert known["low"] == [None, *(step / 2 for step in range(1, 50))]
    assert known["high"] == [None, *(2.0 * step for step in range(1, 50))]
    assert len(drawn["x"]) == POINTS and drawn["high"][-1] == 2000 and drawn["low"][1] == pytest.approx(5 / 2)
    assert data["ends"][0]["ends"][0]["interval"] == [24.5, 98.0]


def test_a_histogram_is_that_of_the_last_step_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", some_rows(5, 0))
    rows = [
        {"step": step, "histogram/reward": {"edges": [0.0, 0.5, 1.0], "counts": [1.0, 1.0 * step]}} for step in (4, 5)
    ]
    edges = [[0.0, 1.0], [1.0, 0.0, 2.0], [0.0, None, 2.0], "x"]
    rows[-1] |= {f"histogram/odd{place}": {"edges": each, "counts": [1.0, 2.0]} for place, each in enumerate(edges)}
    (folder / "histograms.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "hist')
    data = data_in(page_of([folder, make_run(tmp_path / "b", some_rows(5, 1))]))
    last = {"step": 5, "edges": [0.0, 0.5, 1.0], "counts": [1.0, 5.0]}
    assert data["histograms"] == {"histogram/reward": [last, None]}
    assert data["metrics"]["histogram/reward"]["unit"] == "episodes"


def test_a_completion_cannot_leave_the_data_and_nothing_is_fetched(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)><!-- \u2028 @DATA@"
    sample = {"step": 3, "prompt": "p" * 5000, "completion": hostile, "reward": 1.0, "rewards": {"right": 1.0}}
    samples = [sample] * (SAMPLES + 5)
    page = page_of([make_run(tmp_path / "a", some_rows(5, 0), samples)])
    assert page.count("</script>") == 2 and "<img" not in page
    rows = data_in(page)["samples"]
    assert len(rows) == SAMPLES and rows[0][5] == hostile and rows[0][3] == "right 1"
    assert rows[0][4].endswith("(5000 characters)")
    addresses = set(re.findall(r"https?://[^\"'\s]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a language, and no place"
    template = TEMPLATE.read_text()
    assert not re.search(r"\b(?:src|href)\s*=|@import|url\(", template) and "innerHTML" not in template


def test_of_samples_that_fill_many_bytes_the_newest_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.telemetry.reports.page.MOST_BYTES", 2500)
    samples = [{"step": step, "completion": "x" * 1000} for step in range(1, 9)]
    rows = data_in(page_of([make_run(tmp_path / "a", some_rows(5, 0), samples)]))["samples"]
    assert [row[1] for row in rows] == [8, 7]


def test_samples_show_what_was_learned_how_old_it_was_and_what_became_of_it(tmp_path: Path) -> None:
    long = "x" * 5000
    known = {"version_min": 3, "version_max": 5, "staleness_min": 0, "staleness_max": 0, "finish_reason": "stop"}
    samples = [
        {"step": 2, "completion": "abc", "segments": [["learned", "ab"], ["read", "c"]], **known},
        {"step": 3, "completion": "old", "segments": [["stale", "old"]], "dropped": "stale"},
        {"step": 1, "group_id": 3, "prompt": "p", "dropped": "filtered", "detail": "mine: no"},
        {"step": 4, "completion": long, "segments": [["learned", long], ["read", "never shown"]]},
        {"step": 5, "completion": "whole", "segments": "damaged"},
    ]
    folder = make_run(tmp_path / "a", some_rows(5, 0), samples)
    (folder / "eval_samples.jsonl").write_text(
        json.dumps({"step": 3, "eval_set": "held", "row": 7, "prompt": "p", "failed": "it raised"}) + "\n"
    )
    rows = {(row[1], row[10]): row for row in data_in(page_of([folder]))["samples"]}
    assert next(iter(rows)) == (5, "training") and rows[5, "training"][5] == "whole"
    assert rows[2, "training"][5:] == [
        {"value": "abc", "segments": [["learned", "ab"], ["read", "c"]]}, "stop", "3 to 5", 0, "", "training",
    ]  # fmt: skip
    assert rows[1, "training"][5:] == ["", None, None, None, "filtered: mine: no", "training"]
    assert rows[3, "training"][9] == "stale" and rows[3, "held"][9] == "it raised"
    assert rows[4, "training"][5]["segments"] == [["learned", long[:4000]], ["", " …"]]


def test_what_is_broken_or_not_finite_keeps_nobody_from_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [
        {"step": 1, "reward": float("nan"), "rewards": {"right": None, "long": 0.5}, "completion": "\ud800 half"},
        {"step": 2, "reward": 0.5, "rewards": [1], "prompt": None},
        {"step": 0, "reward": 10**400, "rewards": {"right": -(10**400)}},
    ]
    folder = make_run(tmp_path / "a", some_rows(5, 0), samples)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 6, "rew\n\xff\n[1]\n{"loss/total": 1}\n{"step": 6, "loss/total": 1e999, "reward/mean": 0.5}\n'
        )
        row = {"step": 7, "kl/behavior": 10**400, "loss/total": 10**400, "eval/held/count": 10**400}
        file.write(json.dumps(row).encode() + b"\n")
    assert main(["report", str(folder)]) == 0
    assert "4 lines cannot be read" in caplog.text
    data = data_in((folder / "report.html").read_text(encoding="utf-8"))
    other = make_run(tmp_path / "b", some_rows(5, 0))
    assert main(["compare", str(folder), str(other)]) == 0
    assert data["runs"][0]["steps"] == 6 and "kl/behavior" not in data["curves"]
    assert data["curves"]["reward/mean"][0]["y"][-1] == 0.5
    assert data["curves"]["loss/total"][0]["x"][-1] == 5
    assert [row[2] for row in data["samples"]] == [0.5, None, None]
    assert data["samples"][1][3] == "right None, long 0.5" and data["samples"][1][5] == "? half"


def test_the_command_writes_it_into_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", some_rows(5, 0))
    assert main(["report", str(folder)]) == 0
    assert data_in((folder / "report.html").read_text())["runs"][0]["name"] == "a"
    assert main(["report", str(folder), "--to", str(tmp_path / "x.html")]) == 0 and (tmp_path / "x.html").exists()
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("seed: 1\n")
    assert main(["report", str(empty)]) == 0


def test_many_large_runs_are_read_by_several_processes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(tmp_path / f"run{seed}", some_rows(300, seed)) for seed in range(3)]
    alone = data_in(page_of(folders))
    monkeypatch.setattr(compared, "ALONE_BYTES", 0)
    assert data_in(page_of(folders)) == alone
