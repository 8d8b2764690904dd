"""The smaller built-in rewards, and rules that hold for all of them."""

from __future__ import annotations

import inspect
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from asyncrl.checks.rewards import LIBRARY
from asyncrl.config import config_dir
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.library import math_verified
from asyncrl.rewards.library.answers import boxed_answer, tagged_answer
from asyncrl.rewards.library.choice import choice
from asyncrl.rewards.library.gsm8k import gsm8k
from asyncrl.rewards.library.layout import Format
from asyncrl.rewards.library.math_verified import MathVerified
from asyncrl.rewards.library.overlong import Overlong
from asyncrl.user_code import load_function

MEANT_FOR_OTHERS = {"format", "overlong", "reward_model"}
"""Parts of a reward, and the one that `reward=model` names."""


def test_every_reward_that_ships_can_be_loaded_and_has_its_settings_and_its_line_in_the_docs():
    page = Path("docs/rewards.md").read_text()
    for name, path in LIBRARY.items():
        if name != "reward_model":  # its module needs torch, in its own process
            assert callable(load_function(path)), name
        assert f"`{name}`" in page, name
        if name not in MEANT_FOR_OTHERS | {"exact_match"}:
            assert yaml.safe_load((config_dir() / "reward" / f"{name}.yaml").read_text())["function"] == name


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("<answer>B</answer>", "B"),
        ("<answer> (b) </answer>", "B"),
        ("<answer>A</answer> no <answer>B</answer>", "B"),
        (r"So \boxed{B}", "B"),
        (r"So \boxed{\text{B}}", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B)", "B"),
        ("Answer: **B**", "B"),
        ("answer is A? No: the correct option is B", "B"),
        ("I think\nB", "B"),
        ("I think\n(B).", "B"),
        ("**B**", "B"),
        ("A or B", None),
        ("Both", None),
        ("<answer>none</answer>", None),
        ("", None),
    ],
)
def test_the_letter_is_the_one_that_the_completion_settles_on(completion, letter):
    row = {"prompt": "p", "answer": "B"}
    assert choice(completion, row, format_score=0.1) == (1.0 if letter else 0.0)
    assert choice(completion, row | {"answer": 0}, format_score=0.1) == (0.1 if letter else 0.0)


def test_a_right_answer_that_names_no_choice_is_a_failure():
    with pytest.raises(RewardError, match="a letter from A to J"):
        choice("A", {"prompt": "p", "answer": "Paris"})


@pytest.mark.parametrize(
    ("style", "completion", "fits"),
    [
        ("think_answer", "<think>a</think><answer>b</answer>", True),
        ("think_answer", "<think>a\nb</think>\n<answer>b</answer>\n", True),
        ("think_answer", "so <think>a</think><answer>b</answer>", False),
        ("think_answer", "<think>a</think><answer>b</answer> so", False),
        ("think_answer", "<think>a<think>b</think><answer>b</answer>", False),
        ("think_answer", "<answer>b</answer><think>a</think>", False),
        ("think", "<think>a</think> so", True),
        ("think", "<think>a</think> so <think>", False),
        ("answer", "so <answer>b</answer>", True),
        ("answer", "<answer>a</answer><answer>b</answer>", False),
        ("boxed", r"so \boxed{1}.", True),
        ("boxed", "so 1", False),
    ],
)
def test_format_asks_for_the_whole_form(style, completion, fits):
    assert Format(style=style)(completion, {}) == float(fits)


def test_format_takes_a_pattern_and_refuses_what_is_none():
    assert Format(pattern=r"\d+", score=2.0, wrong=-1.0)("12", {}) == 2.0
    assert Format(pattern=r"\d+", score=2.0, wrong=-1.0)("12 ", {}) == -1.0
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        Format(pattern="(")
    with pytest.raises(ConfigError, match="style must be think_answer"):
        Format(style="thinking")


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (110, -1.5)])
def test_overlong_falls_over_the_buffer_as_dapo_publishes(tokens, reward):
    """20480 tokens with a buffer of 4096 there: nothing until 16384, then in a line, -1 at the limit."""
    assert Overlong(max_length=100, buffer=20)("", {}, [0] * tokens) == pytest.approx(reward)
    assert Overlong(max_length=100, buffer=20, penalty=0.5)("", {}, [0] * tokens) == pytest.approx(reward / 2)


def test_overlong_refuses_a_buffer_beyond_the_length():
    with pytest.raises(ConfigError, match="at most max_length=100; got 101"):
        Overlong(max_length=100, buffer=101)


EQUAL = [
    ("1/2", r"\boxed{\frac12}"),
    (r"\frac{1}{2}", "It is 0.5"),
    ("50%", r"\boxed{0.5}"),
    ("50%", r"It is \boxed{50\%}"),
    (r"50\%", "0.5"),
    ("-5", "\\boxed{\u22125}"),
    ("1000", "#### $1,000."),
    ("1,000", "1000"),
    ("x+1", "$1+x$"),
    (r"x^2-1", r"\boxed{(x-1)(x+1)}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("(1,2]", "$(1,2]$"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    (r"\text{east}", r"\boxed{east}"),
    (r"\dfrac{3}{4}", r"\boxed{0.75}"),
    (r"\pi", r"$\boxed{\pi}$"),
    ("42", "I first had 41, then \\boxed{42}."),
]
UNEQUAL = [
    ("1/2", r"\boxed{\frac13}"),
    ("42", r"\boxed{41}"),
    ("42", "no idea"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("42", ""),
]


def test_math_knows_what_is_equal():
    reward = MathVerified(timeout_s=60)
    assert [(truth, given) for truth, given in EQUAL if reward(given, {"answer": truth}) != 1.0] == []
    assert [(truth, given) for truth, given in UNEQUAL if reward(given, {"answer": truth}) != 0.0] == []


def test_math_may_ask_for_a_box():
    reward = MathVerified(boxed=True, wrong=-1.0, timeout_s=60)
    assert reward(r"\boxed{42}", {"answer": "42"}) == 1.0
    assert reward("42", {"answer": "42"}) == -1.0


def test_math_that_takes_too_long_is_a_failure_and_no_zero(monkeypatch):
    monkeypatch.setattr(math_verified, "verify", lambda *_, **__: time.sleep(60))
    with pytest.raises(RewardError, match=r"took longer than reward\.args\.timeout_s=0\.2") as failed:
        MathVerified(timeout_s=0.2)("42", {"answer": "42"})
    assert failed.value.reason == "timed_out"


def test_answers_are_cut_out_whole():
    assert boxed_answer(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{1") is None
    assert tagged_answer("<answer>a</answer><answer>\nb </answer>") == "b"


@pytest.mark.parametrize("reward", ["gsm8k", "math_dapo", "qa_exact_match", "f1", "math"])
@pytest.mark.parametrize(("answer", "right"), [(5, True), (5.0, True), ("5", True), (50.0, False), (None, None)])
def test_a_whole_number_that_a_table_keeps_as_a_float_is_that_number(reward: str, answer: object, right: bool | None):
    function: Any = load_function(LIBRARY[reward])
    made: Any = function() if inspect.isclass(function) else function
    said, row = "#### 5\n\\boxed{5}\n<answer>5</answer>\nAnswer: 5", {"answer": answer}
    if right is None:
        with pytest.raises(RewardError, match="needs a value in one of the columns"):
            made(said, row)
        return
    found = made(said, row)
    assert ((found["score"] if isinstance(found, dict) else found) > 0) == right


GRADERS = ["gsm8k", "math_dapo", "qa_exact_match", "f1", "math", "exact_match", "choice"]


def scored(reward: str, said: str, answer: object) -> float:
    function: Any = load_function(LIBRARY[reward])
    returned = (function() if isinstance(function, type) else function)(said, {"answer": answer})
    return returned["score"] if isinstance(returned, dict) else returned


@pytest.mark.parametrize("reward", GRADERS)
@pytest.mark.parametrize(
    "answer", [True, np.bool_(True), b"5", np.bytes_(b"5"), {"value?": 5}, [b"5"], [], [True], object()]
)
def test_an_answer_that_is_neither_text_nor_number_is_refused(reward: str, answer: object):
    with pytest.raises(RewardError, match="right answer"):
        scored(reward, "#### 5 \\boxed{5} Answer: 5", answer)


@pytest.mark.parametrize("reward", [name for name in GRADERS if name not in ("f1", "qa_exact_match")])
@pytest.mark.parametrize("answer", ["", " \n", [""]])
def test_an_empty_right_answer_is_refused(reward: str, answer: object):
    with pytest.raises(RewardError, match="empty text"):
        scored(reward, "", answer)


NUMPY = [np.float32(0.1), np.float64(0.1), Decimal("0.1"), np.array([7.5, 0.1]), [np.float32(0.1)]]


@pytest.mark.parametrize("answer", NUMPY, ids=repr)
@pytest.mark.parametrize(
    ("reward", "form"), [("gsm8k", "#### {}"), ("math", "\\boxed{{{}}}"), ("math_dapo", "Answer: {}")]
)
def test_numbers_of_numpy_are_those_of_their_digits(reward: str, form: str, answer: object):
    assert scored(reward, form.format("0.1"), answer) == 1.0
    assert scored(reward, form.format("0.2"), answer) <= 0.0


def test_an_index_of_numpy_names_a_choice():
    assert scored("choice", "Answer: C", np.int64(2)) == 1.0
    assert scored("choice", "Answer: B", np.int64(2)) == 0.0


def test_a_number_that_no_completion_could_name_is_refused_by_gsm8k():
    with pytest.raises(RewardError, match="needs a right answer that is a number; the row has 'Paris'"):
        gsm8k("#### Paris", {"answer": "Paris"})
