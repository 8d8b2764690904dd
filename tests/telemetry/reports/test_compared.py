"""`asyncrl compare`: its numbers are those of the files."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli.main import main
from asyncrl.telemetry.reports import compared
from asyncrl.telemetry.reports.compared import by_chance, names_of
from asyncrl.telemetry.reports.summary import read_metrics, summary


def make_run(folder: Path, seed: int, lr: float, rewards: list[float], accuracy: float | None = None) -> Path:
    folder.mkdir(parents=True)
    settings = f"seed: {seed}\nrun:\n  name: {folder.name}\n  dir: {folder}\nlearner:\n  lr: {lr}\n  steps: 40\n"
    (folder / "config.yaml").write_text(settings)
    rows = [{"step": step, "time": float(step), "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    if accuracy is not None:
        rows.append({"step": len(rewards), "time": 99.0, "eval/heldout/accuracy": accuracy, "eval/heldout/count": 9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def told(capsys: pytest.CaptureFixture[str], *folders: Path) -> dict:
    assert main(["compare", *map(str, folders), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_settings_that_differ_and_where_the_curves_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [step / 40 for step in range(40)]
    first = make_run(tmp_path / "a", 0, 0.1, rewards, accuracy=0.75)
    second = make_run(tmp_path / "b", 0, 0.2, rewards[:7])
    found = told(capsys, first, second)
    assert found["settings"].keys() == {"run.name", "run.dir", "learner.lr"}
    assert found["settings"]["learner.lr"] == [0.1, 0.2]
    ends = found["ends"]["reward/mean"]
    assert ends[0] == {"value": statistics.fmean(rewards[-4:]), "count": 4, "step": 40, "last": rewards[-1]}
    assert ends[1] == {"value": rewards[6], "count": 1, "step": 7, "last": rewards[6]}
    assert found["ends"]["eval/heldout/accuracy"] == [{"value": 0.75, "count": 1, "step": 40, "last": 0.75}, None]
    assert found["differences"] == []
    assert main(["compare", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "learner.lr" in said and "0.9375 *" in said and "two seeds" in said


def test_of_a_long_run_only_what_is_compared_is_held(tmp_path: Path) -> None:
    """All rows of twenty runs of 10,000 steps took 3.6 GB."""
    folder = make_run(tmp_path / "a", 0, 0.1, [0.5], accuracy=0.75)
    row = {"step": 2, "time": 2.0, "loss/total": 0.1, "staleness/hist_0": 1.0, "eval/heldout/accuracy_low": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (run,) = compared.read_runs([folder])
    assert {name for each in run.rows for name in each} == {
        "step", "time", "reward/mean", "loss/total", "eval/heldout/accuracy", "eval/heldout/count",
        "eval/heldout/accuracy_low",
    }  # fmt: skip


def test_a_run_that_diverged_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its curves end in means of the steps in which they were finite."""
    good, bad = (make_run(tmp_path / name, 0, lr, []) for name, lr in (("good", 0.1), ("bad", 9.0)))
    for folder, last in ((good, 0.2), (bad, None)):
        losses = [0.3, None, 0.2, last, last]
        rows = [{"step": step, "time": float(step), "loss/total": loss} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [run["diverged"] for run in told(capsys, good, bad)["runs"]] == [None, 4]
    assert main(["compare", str(good), str(bad)]) == 0
    said = capsys.readouterr().out
    assert "5 (diverged from 4 on)" in said and "of the steps before" in said
    assert "diverged: from step 4 on" in summary(read_metrics(bad)) and "diverged" not in summary(read_metrics(good))


def test_names_and_values_in_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_run(tmp_path / "[red]a", 0, 0.1, [0.5])
    second = make_run(tmp_path / "b", 0, 0.1, [0.5])
    for folder, path in ((first, "[/x].jsonl"), (second, "[math]:smile:")):
        (folder / "config.yaml").write_text(f"seed: 0\ndata: {{path: '{path}'}}\n")
    assert main(["compare", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "[red]a" in said and "[/x].jsonl" in said and "[math]:smile:" in said


def test_experiments_of_several_seeds_are_told_apart_by_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [make_run(tmp_path / f"good{seed}", seed, 0.1, [0.9 + seed / 100]) for seed in range(4)]
    bad = [make_run(tmp_path / f"bad{seed}", seed, 0.2, [0.5 + seed / 100]) for seed in range(4)]
    (found,) = told(capsys, *good, *bad)["differences"]
    assert found["first"] == [run.name for run in good] and found["means"] == pytest.approx([0.915, 0.515])
    assert found["p"] == found["least_p"] == 2 / 70
    assert told(capsys, good[0], *bad)["differences"] == [], "one seed tells nothing"


def test_seeds_that_have_no_value_are_not_counted_and_runs_of_other_lengths_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [make_run(tmp_path / f"good{n}", n, 0.1, [0.9] * (9 - n), accuracy=0.9 if n else None) for n in range(3)]
    bad = [make_run(tmp_path / f"bad{n}", n, 0.2, [0.5], accuracy=0.5) for n in range(3)]
    found = {each["metric"]: each for each in told(capsys, *good, *bad)["differences"]}
    assert found["eval/heldout/accuracy"]["first"] == ["good1", "good2"] and len(found["reward/mean"]["first"]) == 3
    for folders, said in ((good, True), (bad, False)):
        assert main(["compare", *map(str, folders)]) == 0
        assert ("The runs have not trained the same number of steps" in capsys.readouterr().out) == said


def test_the_permutation_test_is_that_of_all_ways_or_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.4, 1, 5), rng.normal(0, 1, 6)
    values = np.concatenate([first, second])
    ways = [
        abs(values[list(chosen)].mean() - np.delete(values, list(chosen)).mean())
        for chosen in itertools.combinations(range(11), 5)
    ]
    exact = np.mean(np.array(ways) >= abs(first.mean() - second.mean()) - 1e-12)
    assert by_chance(list(first), list(second)) == pytest.approx(exact)
    monkeypatch.setattr(compared, "PERMUTATIONS", 400)
    assert by_chance(list(first), list(second)) == pytest.approx(exact, abs=0.1)
    assert by_chance([1.0, 1.0], [1.0, 1.0]) == 1.0


def test_runs_are_called_by_as_much_of_their_path_as_tells_them_apart(tmp_path: Path) -> None:
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names_of([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]


def test_a_run_that_is_given_twice_is_refused_and_no_second_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", 0, 0.1, [1.0])
    (tmp_path / "b").symlink_to(run)
    for command in ("compare", "report"):
        assert main([command, str(run), str(tmp_path / "b")]) == 2
        assert "is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("bound", ["", "60"])
def test_no_number_of_a_table_is_cut_however_many_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setenv("COLUMNS", bound)
    runs = [make_run(tmp_path / f"run{place}", 0, 0.1 + place, [0.123456 + place]) for place in range(12)]
    assert main(["compare", *map(str, runs)]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and all(f" {0.123456 + place:.4g} " in shown for place in range(12))


def test_what_is_no_number_has_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", 0, 0.1, [0.5, 0.5])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 3.0, "reward/mean": [1], "loss/total": "0.5"}\n')
    found = told(capsys, run)
    assert found["ends"]["reward/mean"][0]["value"] == 0.5 and found["ends"]["loss/total"] == [None]


def test_what_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_a_setting_that_an_older_version_did_not_have_differs_only_where_it_does_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, seed, 0.1, [0.5 + seed / 10]) for seed, name in enumerate("abc")]
    for folder, own in zip(runs, ("", "  skip_spikes: 0.0\n", "  skip_spikes: 2.0\n"), strict=True):
        with (folder / "config.yaml").open("a") as file:
            file.write(own)
    assert told(capsys, *runs[:2])["settings"].keys() == {"seed", "run.name", "run.dir"}, "0.0 is what it always did"
    found = told(capsys, runs[0], runs[2])["settings"]
    assert found["learner.skip_spikes"] == ["unknown there", 2.0]
    apart = compared.experiments(compared.read_runs(runs))
    assert [[run.name for run in each] for each in apart] == [["a", "b"], ["c"]]
