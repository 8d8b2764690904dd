"""Tests of `asyncrl data check`: what a run would draw, and whether the reward recognises the rows' own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.cli.main import main
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.rewards.reference_answers import reference_text
from asyncrl.sandbox.level import Level
from asyncrl.sandbox.running import unavailable

REWARDS = """
import re
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert type(extra_info) is dict and type(extra_info["index"]) is int
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0
def exact(completion, row):
    return float(completion == row["answer"])
def generous(completion, row):
    return 1.0
"""


def task(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    save_byte_tokenizer(folder / "model")
    (folder / "r.py").write_text(REWARDS)
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["model.path=model", "data.path=d.jsonl"]


def test_verls_rows_with_verls_reward_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} apples and {'one ' * n}more?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n, "level": n % 4},
        }
        for n in range(40)
    ]
    given = task(tmp_path, rows[:1])
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    settings = [*given, "data.path=train.parquet", "reward.function=r.py:compute_score", "data.max_prompt_tokens=120"]
    assert main(["data", "check", *settings, "data.where.extra_info.level.min=1"]) == 0
    said = capsys.readouterr().out
    assert "train.parquet: 30 of 40 rows let through by data.where, all of a form that can be used" in said
    assert "tokens of 30 prompts (data.max_prompt_tokens=120):" in said and "> 120" in said and "█" in said
    assert "the first prompt (train.parquet[1])" in said and "user: 1 apples and one more?\nassistant: ▶1◀" in said
    assert "the reward of 8 rows' own answers: 1, best as '#### ANSWER'; of an empty answer: 0" in said


def test_a_row_whose_own_answer_the_reward_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [{"prompt": f"{n}?", "answer": str(n)} for n in range(6)]
    given = task(tmp_path, [*rows[:3], {"prompt": "x", "answer": 7}, *rows[3:]])
    assert main(["data", "check", *given, "reward.function=r.py:exact"]) == 1
    said = capsys.readouterr().out
    assert "d.jsonl:4: its own answer '7' scores 0, and an empty answer 0" in said
    assert "d.jsonl:3:" not in said and "own answers: 0 to 1, best as 'ANSWER'" in said
    assert main(["data", "check", *given, "reward.function=r.py:generous"]) == 1
    assert "d.jsonl:1: its own answer '0' scores 1, and an empty answer 1" in capsys.readouterr().out


def test_an_answer_with_half_a_character_is_a_row_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = task(tmp_path, [{"prompt": "a", "answer": "cut \ud83d"}, {"prompt": "b", "answer": "1"}])
    assert main(["data", "check", *given, "reward.function=r.py:exact"]) == 0
    assert "2 rows" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [[], ["reward.args.column=kind"]])
def test_a_number_of_a_choice_is_answered_by_its_letter_and_the_rewards_own_column_comes_first(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [
        {"prompt": f"{n}?", "answer": "see page 3" if settings else n, "kind": "cab"[n]} for n in range(3)
    ]
    assert main(["data", "check", *task(tmp_path, rows), "reward=choice", *settings]) == 0
    said = capsys.readouterr().out
    assert "of 3 rows' own answers: 1, best as" in said and f"▶{'c' if settings else '0'}◀" in said


def test_rows_without_a_right_answer_beside_others_that_have_one_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = ["1", None, float("nan"), "4"]
    given = task(tmp_path, [{"prompt": f"{n}?", "answer": answer} for n, answer in enumerate(answers)])
    assert main(["data", "check", *given, "reward=exact_match"]) == 0
    said = capsys.readouterr().out
    assert "the reward of 2 rows' own answers: 1" in said
    assert "2 of the 4 rows looked at have no right answer, d.jsonl:2 first" in said


def test_without_a_reward_rows_and_shares_are_shown_and_bad_data_is_refused_as_at_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, _ = task(tmp_path, [{"prompt": "a>", "answer": "b"}] * 3)
    mixture = ["data.mixture.one=d.jsonl", "data.mixture.two.path=d.jsonl", "data.mixture.two.weight=3"]
    assert main(["data", "check", model, *mixture]) == 0
    said = capsys.readouterr().out
    assert "of 1,000 prompts: 750 of two, 250 of one" in said and "no reward was given" in said
    with Path("d.jsonl").open("a") as file:
        file.write('{"text": 1}\n')
    assert main(["data", "check", model, "data.path=d.jsonl"]) == 2
    assert "d.jsonl:4 has no column `prompt`" in capsys.readouterr().err
    assert main(["data", "check", model, "data.path=gone.jsonl"]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"reward_model": {"ground_truth": "4"}, "answer": "long"}, "4"),
        ({"reward_model": {"ground_truth": {"target": ["Paris", "paris"]}}}, "Paris"),
        ({"answer": ["a", "b"]}, "a"),
        ({"solution": 3}, "3"),
        ({"other": 3}, None),
    ],
)
def test_the_right_answer_is_found_where_people_keep_it(row: dict[str, Any], truth: str | None) -> None:
    assert reference_text(row) == truth


def test_a_right_answer_that_a_reward_cannot_compare_is_named_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = task(tmp_path, [{"prompt": "a", "answer": True}, {"prompt": "b", "answer": {"a": "1"}}])
    assert main(["data", "check", *given, "reward=math_dapo"]) == 1
    said = capsys.readouterr().out
    one, other = (line for line in said.splitlines() if "cannot compare with the right answer" in line)
    assert one.startswith("d.jsonl:1: ") and "the right answer True, which is of type bool" in one
    assert other.startswith("d.jsonl:2: ") and "the right answer {'a': '1'}, which is of type dict" in other


@pytest.mark.slow
def test_programs_of_the_rows_are_tried_as_completions_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    isolation = "rlimits" if unavailable(Level.NAMESPACES) else "namespaces"
    tests = {"inputs": ["1 2"], "outputs": ["3"]}
    row = {"prompt": "a", "tests": tests, "solutions": json.dumps(["print(sum(map(int, input().split())))"])}
    given = [*task(tmp_path, [row, row | {"solutions": "[]"}]), "reward=code", f"reward.args.isolation={isolation}"]
    assert main(["data", "check", *given]) == 0
    said = capsys.readouterr().out
    assert "the reward of 1 rows' own answers: 1, best as 'a program'" in said and "1 of the 2 rows" in said
    given = task(tmp_path, [row | {"solutions": json.dumps(["print(4)"])}]) + given[2:]
    assert main(["data", "check", *given]) == 1
    assert "d.jsonl:1: its own answer 'in code' scores 0, and an empty answer 0" in capsys.readouterr().out
