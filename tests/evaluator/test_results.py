from __future__ import annotations

from asyncrl.config import load_config
from asyncrl.evaluation.samples import Sample
from asyncrl.evaluator.results import REASONS, failure_lines, reasons, results, table_of, text_of


def config(*overrides: str):
    given = ["model.path=m", "data.path=d", "reward.function=r.py:f", "eval.samples=2", "eval.temperature=1"]
    return load_config([*given, *overrides])


def row(number: int, *rewards: float | None, source: str = "", text: str = "#### 3") -> list[Sample]:
    return [
        Sample(row=number, sample=n, data_source=source, completion=text, reward=reward, failed="" if reward is not None
               else "RewardError: no judge")
        for n, reward in enumerate(rewards)
    ]  # fmt: skip


def test_of_right_and_wrong_scores_only_figures_that_differ_are_shown() -> None:
    table = table_of(config(), {0: row(0, 1.0, 0.0), 1: row(1, 0.0, 0.0)})
    head, line = text_of(table, 2)
    assert head.split() == ["data_source", "rows", "failed", "avg@2", "pass@2", "maj@2"]
    assert line.split()[:4] == ["all", "2", "0", "0.250"]


def test_of_graded_scores_the_best_is_shown_beside_what_passes() -> None:
    table = table_of(config("eval.pass_score=0.5"), {0: row(0, 0.6, 0.2)})
    assert text_of(table, 2)[0].split()[3:] == ["avg@2", "pass@1", "pass@2", "maj@2", "best@2"]


def test_how_answers_are_found_is_a_setting_that_changes_the_votes_alone() -> None:
    done = {0: [*row(0, 1.0, text="#### 3"), *row(0, 0.0, text="#### 4")[:1]]}
    assert "maj@2" in table_of(config(), done)[0].estimates
    assert "maj@2" not in table_of(config("eval.answer=boxed"), done)[0].estimates
    assert "maj@2" not in table_of(config("eval.answer=none"), done)[0].estimates


def test_results_tell_every_figure_per_data_source_and_why_samples_failed() -> None:
    done = {0: row(0, 1.0, 1.0, source="gsm8k"), 1: row(1, 0.0, None, source="math"), 2: row(2, None, None)}
    table = table_of(config(), done)
    found = results(config(), {"seed": 0}, table, done)
    by_name = {line["name"]: line for line in found["table"]}
    assert set(by_name) == {"gsm8k", "math", "all"}
    assert by_name["gsm8k"]["pass@2"]["value"] == 1.0 and "pass@2" not in by_name["math"]
    assert (by_name["all"]["rows"], by_name["all"]["samples"], by_name["all"]["failed"]) == (3, 3, 3)
    assert found["failures"] == {"RewardError: no judge": 3} and reasons(done) == [("RewardError: no judge", 3)]


def test_a_failed_evaluation_says_how_many_kinds_of_reasons_there_are() -> None:
    failed = [f"kind {kind}" for kind in range(REASONS + 3)] + ["kind 0"]
    done = {
        row: [Sample(row=row, sample=0, data_source="", completion="", reward=None, failed=why)]
        for row, why in enumerate(failed)
    }
    lines = failure_lines(done)
    assert lines[0] == "failed, 2 sample(s): kind 0" and len(lines) == REASONS + 1
    assert (
        lines[-1]
        == f"{REASONS + 4} samples failed, for {REASONS + 3} different reasons, the {REASONS} most common above"
    )
    assert failure_lines({0: done[0]}) == ["failed, 1 sample(s): kind 0"]
