"""What a start refuses of a reward: one that does not recognise the rows' own answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.checks.rewards import LIBRARY, RewardTerm
from asyncrl.errors import ConfigError
from asyncrl.rewards.reference_answers import reference_completions
from asyncrl.rewards.trial import refuse_silent

TWO_LINES = {"prompt": "p", "answer": "one\ntwo"}
"""`math_dapo` reads one line."""


def term(name: str, **args: object) -> RewardTerm:
    return RewardTerm(function=LIBRARY[name], args=dict(args))


def test_a_reward_that_knows_no_row_s_own_answer_is_refused_with_the_row():
    rows = [(f"d.jsonl:{n}", TWO_LINES) for n in (1, 2)]
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: math_dapo gives the row's own answer 'one\\ntwo' no more than"):
        refuse_silent([term("math_dapo")], rows, timeout_s=60)


def test_one_silent_row_among_others_is_named_and_not_refused():
    rows = [("d.jsonl:1", {"prompt": "p", "answer": "7"}), ("d.jsonl:2", TWO_LINES)]
    (line,) = refuse_silent([term("math_dapo"), RewardTerm(function="mine.py:f")], rows, timeout_s=60)
    assert line.startswith("d.jsonl:2: math_dapo gives the row's own answer 'one\\ntwo' no more than an empty one (-1)")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gsm8k", {"answer": "48/2=24\n#### 1,072"}),
        ("gsm8k", {"answer": 1e-05}),
        ("math_dapo", {"solution": "34"}),
        ("exact_match", {"answer": 2.5}),
        ("choice", {"answer": 2}),
        ("choice", {"answer": "Paris", "choices": ["Rome", "Paris"]}),
        ("f1", {"answers": {"text": ["Paris"], "answer_start": [1]}}),
        ("f1", {"answers": {"text": [], "answer_start": []}}),
        ("qa_exact_match", {"golden_answers": ["Paris", "Lutetia"]}),
    ],
)
def test_the_own_answer_of_each_form_of_row_is_heard(name: str, row: dict):
    assert refuse_silent([term(name)], [("d.jsonl:1", {"prompt": "p", **row})], timeout_s=60) == []


def test_the_own_answer_comes_from_the_rewards_own_column_first():
    row = {"prompt": "p", "answer": "1", "kind": "2"}
    texts = [text for _, text in reference_completions([term("gsm8k", column="kind")], row)]
    assert "#### 2" in texts and "#### 1" not in texts
    assert reference_completions([term("code")], row) == []


def test_a_grader_of_weight_zero_knows_right_answers():
    """In distillation the reward is only logged."""
    logged = replace(term("gsm8k"), weight=0.0)
    row = {"prompt": "p", "answer": "2 + 2 = 4\n#### 4"}
    assert refuse_silent([logged], [("d.jsonl:1", row)], timeout_s=60) == []
