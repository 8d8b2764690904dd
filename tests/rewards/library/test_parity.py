"""What verl publishes of its rewards, case by case: each table stands for itself, none is made by our code.

Its documentation and docstrings say: GSM8K's answer follows `#### ` (strict) or is the last number (flexible), commas
left out in strict alone, compared as text, within the last 300 characters; DAPO's follows the last `Answer:`, both
sides normalised as Minerva does; a question's is in the last `<answer>` tag, compared as SQuAD does.
"""

from __future__ import annotations

import itertools

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards.library.gsm8k import gsm8k
from asyncrl.rewards.library.math_dapo import math_dapo
from asyncrl.rewards.library.question_answering import f1, qa_exact_match

RIGHT, FORM, NONE = 1.0, 0.1, 0.0
BEFORE = ("", "She has 3 + 4 = 7 left.\n", "First, 12. Then 1,000 more; -5 in all.\n", "x" * 400)


def judged(truth, **columns) -> dict:
    return {"prompt": "p", "reward_model": {"style": "rule", "ground_truth": truth}, **columns}


STRICT = [
    # after what comes before, right answer, score with format_score=0.1
    ("#### 72", "72", RIGHT),
    ("#### 72.", "72", FORM),
    ("#### 72 eggs", "72", RIGHT),
    ("#### 1,000", "1000", RIGHT),
    ("#### 1,000,000", "1000000", RIGHT),
    ("#### 1,000.", "1000", FORM),
    ("#### $1,000.", "1000", NONE),
    ("#### $72", "72", NONE),
    ("#### -5", "-5", RIGHT),
    ("#### \u22125", "-5", NONE),
    ("#### - 5", "-5", NONE),
    ("#### +5", "5", NONE),
    ("#### 5%", "5", RIGHT),
    ("#### 0.5", "0.5", RIGHT),
    ("#### .5", "0.5", FORM),
    ("#### 0.50", "0.5", FORM),
    ("#### 5.0", "5", FORM),
    ("#### 7", "72", FORM),
    ("#### 72\n#### 8", "72", FORM),
    ("#### 8\n#### 72", "72", RIGHT),
    ("#### 72 #### ", "72", RIGHT),
    ("####72", "72", NONE),
    ("### 72", "72", NONE),
    ("##### 72", "72", RIGHT),
    ("####  72", "72", NONE),
    ("####\n72", "72", NONE),
    ("#### \n72", "72", NONE),
    ("#### seventy-two", "72", NONE),
    ("#### x72", "72", NONE),
    ("#### (72)", "72", NONE),
    ("#### **72**", "72", NONE),
    ("#### 72**", "72", RIGHT),
    ("#### 1/2", "1", RIGHT),
    ("#### 1/2", "1/2", FORM),
    ("#### ,72", "72", RIGHT),
    ("#### 7,2", "72", RIGHT),
    ("#### 072", "72", FORM),
    ("#### 72\u00b0", "72", RIGHT),
    ("#### \u0667\u0662", "72", NONE),
    ("The answer is 72", "72", NONE),
    ("72", "72", NONE),
    (r"\boxed{72}", "72", NONE),
    ("#### .", "72", FORM),
    ("#### -", "72", NONE),
    ("#### --5", "-5", NONE),
    ("#### 72 of 80", "72", RIGHT),
    ("#### 3.14", "3.14", RIGHT),
    ("#### 12:30", "12", RIGHT),
    ("#### 10-5", "10", RIGHT),
    ("#### 1.000,5", "1.0005", RIGHT),
    ("so 72 #### 72 so", "72", RIGHT),
    ("", "72", NONE),
]
FLEXIBLE = [
    ("72", "72", RIGHT),
    ("The answer is 72", "72", RIGHT),
    ("The answer is 72.", "72", FORM),
    ("The answer is 72 .", "72", RIGHT),
    ("The answer is 72 . .", "72", RIGHT),
    ("The answer is $72", "72", RIGHT),
    ("#### $1,000.", "1000", FORM),
    ("#### 1,000", "1000", FORM),
    ("#### 1,000", "1,000", RIGHT),
    ("1000", "1000", RIGHT),
    ("It is 72, she said", "72", FORM),
    ("It is 72 she said", "72", RIGHT),
    ("It is -5", "-5", RIGHT),
    ("It is \u22125", "-5", FORM),
    ("It is \u22125", "5", RIGHT),
    ("It is - 5", "5", RIGHT),
    ("10-5", "-5", RIGHT),
    ("10 - 5", "5", RIGHT),
    ("0.5", "0.5", RIGHT),
    (".5", ".5", RIGHT),
    ("0.50", "0.5", FORM),
    ("5%", "5", RIGHT),
    ("72 then 8", "72", FORM),
    ("8 then 72", "72", RIGHT),
    ("1/2", "2", RIGHT),
    (r"\boxed{72}", "72", RIGHT),
    (r"\frac{1}{2}", "2", RIGHT),
    ("#### 72 eggs", "72", RIGHT),
    ("#### 72 eggs, 3 left", "3", RIGHT),
    ("72 !", "72", RIGHT),
    ("72!", "72", RIGHT),
    ("x72y", "72", RIGHT),
    ("7 2", "2", RIGHT),
    ("07", "7", FORM),
    ("1e5", "5", RIGHT),
    ("12:30", "30", RIGHT),
    ("**72**", "72", RIGHT),
    ("(72)", "72", RIGHT),
    ("72\u00b0", "72", RIGHT),
    ("seventy-two (72)", "72", RIGHT),
    ("2 apples -3", "-3", RIGHT),
    ("1,2,3", "1,2,3", RIGHT),
    ("1, 2, 3", "3", RIGHT),
    ("3.", "3.", RIGHT),
    ("72 ,", "72", FORM),
    ("a-1", "-1", RIGHT),
    ("\u0667\u0662", "72", None),
    ("no number", "72", None),
    ("...", "72", FORM),
    ("", "72", None),
    ("It costs 3.50", "3.50", RIGHT),
    ("5 x 5 = 25", "25", RIGHT),
]
"""None: no number after what comes before, where that has none either."""


@pytest.mark.parametrize("before", BEFORE, ids=("alone", "after a sum", "after numbers", "far from the start"))
def test_gsm8k_strict_is_what_verl_publishes(before):
    """52 answers after 4 beginnings."""
    for answer, truth, score in STRICT:
        assert gsm8k(before + answer, judged(truth), format_score=FORM) == score, (before[:20], answer, truth)


@pytest.mark.parametrize("before", BEFORE, ids=("alone", "after a sum", "after numbers", "far from the start"))
def test_gsm8k_flexible_is_what_verl_publishes(before):
    """52 answers after 4 beginnings."""
    for answer, truth, score in FLEXIBLE:
        if score is None:  # the last number is one of before
            score = NONE if before in ("", "x" * 400) else FORM
        given = gsm8k(before + answer, judged(truth), method="flexible", format_score=FORM)
        assert given == score, (before[:20], answer, truth)


def test_gsm8k_sees_the_last_300_characters():
    assert gsm8k("#### 72" + " " * 293, judged("72")) == 1.0
    assert gsm8k("#### 72" + " " * 294, judged("72")) == 0.0


NUMERIC = [
    ("#### $1,000.", "1000", RIGHT),
    ("It is \u22125.", "-5", RIGHT),
    ("0.50", "0.5", RIGHT),
    ("5.0 %", "5", RIGHT),
    ("1,000,000", "1000000.00", RIGHT),
    ("72 eggs.", "71", FORM),
    ("none", "72", NONE),
    ("...", "72", NONE),
]


@pytest.mark.parametrize(("completion", "truth", "score"), NUMERIC)
def test_gsm8k_numeric_compares_numbers_in_whatever_dress(completion, truth, score):
    assert gsm8k(completion, judged(truth), method="numeric", format_score=FORM) == score


def test_gsm8k_takes_the_data_set_as_it_is_and_refuses_another_method():
    own = {"prompt": "p", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 1,072"}

    assert gsm8k("#### 1072", own) == 1.0
    with pytest.raises(RewardError, match="strict, flexible, numeric"):
        gsm8k("#### 1072", own, method="fuzzy")
    with pytest.raises(RewardError, match=r"one of the columns reward_model.ground_truth, ground_truth"):
        gsm8k("#### 1072", {"prompt": "p"})


SAME = [
    # what is written after "Answer:", the right answer
    ("42", "42"),
    (" 42 ", "42"),
    ("$42$", "42"),
    ("42.", "42."),
    ("$42.$", "42"),
    ("\\$42", "42"),
    ("1,000", "1000"),
    ("1,000,000", "1000000"),
    ("1{,}000", "1000"),
    ("1,\\!000", "1000"),
    ("x = 5", "5"),
    ("x=y=5", "5"),
    ("-5", "-5"),
    ("$-5$", "-5"),
    ("\\frac{1}{2}", "\\frac{1}{2}"),
    ("\\frac12", "\\frac{1}{2}"),
    ("$\\frac{1}{2}$", "\\frac12"),
    ("\\frac 1 2", "\\frac{1}{2}"),
    ("\\boxed{42}", "42"),
    ("$\\boxed{42}$", "42"),
    ("\\boxed{\\frac{1}{2}}", "\\frac12"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("\\sqrt{2}", "\\sqrt2"),
    ("2\\sqrt3", "2\\sqrt{3}"),
    ("42 dollars", "42"),
    ("42 degrees", "42"),
    ("42^\\circ", "42"),
    ("42^{\\circ}", "42"),
    ("42 cm", "42"),
    ("42 square cm", "42"),
    ("42 km", "42"),
    ("42 mph", "42"),
    ("42 inches", "42"),
    ("42 feet", "42"),
    ("42 hours", "42"),
    ("42 minutes", "42"),
    ("42 points", "42"),
    ("42 cents", "42"),
    ("42 pounds", "42"),
    ("42 meters", "42"),
    ("42 units", "42"),
    ("42 ways", "42"),
    ("42 students", "42"),
    ("42 integers", "42"),
    ("42 digits", "42"),
    ("42 edges", "42"),
    ("42 meals", "42"),
    ("42 multiples", "42"),
    ("42\\text{ cm}", "42"),
    ("42\\text{cm}", "42"),
    ("42\\mbox{ cm}", "42"),
    ("42\\text{ m}", "42"),
    ("\\text{east}", "east"),
    ("\\textbf{42}", "42"),
    ("\\overline{AB}", "AB"),
    ("5\\mathrm{th}", "5"),
    ('"42"', "42"),
    ("1, 2, 3", "1,2,3"),
    ("1,2,\\text{ and }3", "1,2,3"),
    ("(1, 2)", "(1,2)"),
    ("a 42", "42"),
    ("an 42", "42"),
    ("\\pi", "\\pi"),
    ("2\\;\\pi", "2\\pi"),
    ("\\ 42", "42"),
    ("50\\%", "50\\%"),
    ("The value is $42$ indeed", "42"),
    ("0.5", "0.5"),
    ("x^2", "x^2"),
    ("\\{1,2\\}", "\\{1,2\\}"),
    ("1,\\ldots,5", "1,,5"),
    ("10:30", "10:30"),
    ("\\dfrac{1}{2}", "\\dfrac{1}{2}"),
    ("42 childrentickets", "42"),
    ("7 gm", "7"),
]
DIFFERENT = [
    ("43", "42"),
    ("42.", "42"),
    ("\u22125", "-5"),
    ("5", "-5"),
    ("0.50", "0.5"),
    (".5", "0.5"),
    ("1/2", "\\frac{1}{2}"),
    ("0.5", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("\\tfrac{1}{2}", "\\frac{1}{2}"),
    ("50\\%", "50"),
    ("50%", "50"),
    ("2,1", "1,2"),
    ("(2,1)", "(1,2)"),
    ("1,000.5", "1000.5"),
    ("42.0", "42"),
    ("042", "42"),
    ("42 apples", "42"),
    ("forty-two", "42"),
    ("\\sqrt{4}", "2"),
    ("x", "y"),
    ("East", "east"),
    ("\\left(1,2\\right)", "(1,2)"),
    ("2 \\cdot 3", "6"),
    ("1e3", "1000"),
]
LED = [
    "We find it.\nAnswer: {}",
    "answer:{}",
    "ANSWER : {}",
    "Answer: 17\nNo.\nAnswer: {}\nThat is all.",
]
"""Four ways of saying it."""


def test_math_dapo_is_what_verl_publishes():
    """101 answers, each said in 4 ways."""
    for (given, truth), said in itertools.product(SAME, LED):
        assert math_dapo(said.replace("{}", given), judged(truth)) == {"score": 1.0, "acc": 1.0}, (said, given)
    for (given, truth), said in itertools.product(DIFFERENT, LED):
        assert math_dapo(said.replace("{}", given), judged(truth)) == {"score": -1.0, "acc": 0.0}, (said, given)


@pytest.mark.parametrize(
    ("completion", "truth", "box", "score"),
    [
        ("It is 42", "42", False, -1.0),
        ("\\boxed{42}", "42", False, -1.0),
        ("Answer:\n42", "42", False, 1.0),
        ("Answer: 42" + " " * 290, "42", False, 1.0),
        ("Answer: 42\n" + "x" * 300, "42", False, -1.0),
        ("", "42", False, -1.0),
        ("", "[INVALID]", False, 1.0),
        ("so \\boxed{42}", "42", True, 1.0),
        ("so \\boxed{ 42 }", "42", True, -1.0),
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True, 1.0),
        ("so \\boxed{\\frac12}", "\\frac{1}{2}", True, -1.0),
        ("\\boxed{1} and \\boxed{42}", "42", True, 1.0),
        ("\\boxed{42} and \\boxed{1}", "42", True, -1.0),
        ("\\boxed{42", "42", True, -1.0),
        ("\\boxed{42}" + "x" * 90, "42", True, 1.0),
        ("\\boxed{42}" + "x" * 91, "42", True, -1.0),
        ("\\fbox{42}", "42", True, -1.0),
        ("Answer: 42", "42", True, -1.0),
    ],
)
def test_math_dapo_looks_for_the_answer_where_verl_does(completion, truth, box, score):
    assert math_dapo(completion, judged(truth), strict_box=box)["score"] == score


MATCHES = [
    # the answer in the tags, right answers
    ("Paris", ["Paris"]),
    ("paris", ["Paris"]),
    ("PARIS", ["Paris"]),
    (" Paris ", ["Paris"]),
    ("\nParis\n", ["Paris"]),
    ("Paris.", ["Paris"]),
    ("Paris!", ["Paris"]),
    ("'Paris'", ["Paris"]),
    ("the Paris", ["Paris"]),
    ("Paris", ["the Paris"]),
    ("The Beatles", ["Beatles"]),
    ("a dog", ["dog"]),
    ("an owl", ["The owl"]),
    ("New  York", ["New York"]),
    ("New\nYork", ["New York"]),
    ("New-York", ["NewYork"]),
    ("U.S.A.", ["USA"]),
    ("U.S.", ["US"]),
    ("O'Brien", ["OBrien"]),
    ("1,000", ["1000"]),
    ("$1,000.", ["1000"]),
    ("50%", ["50"]),
    ("3.14", ["314"]),
    ("-5", ["5"]),
    ("Rome", ["Paris", "Rome"]),
    ("rome", ["Paris", "The Rome"]),
    ("Paris", "Paris"),
    ("42", "42"),
    ("theory", ["theory"]),
    ("Anna", ["anna"]),
    ("A", ["an"]),
    ("", [""]),
    ("the", ["a"]),
    ("caf\u00e9", ["Caf\u00e9"]),
    ("\u6771\u4eac", ["\u6771\u4eac"]),
    ("Stra\u00dfe", ["stra\u00dfe"]),
    ("rock & roll", ["rock roll"]),
    ("(Paris)", ["[Paris]"]),
    ("1984 (novel)", ["1984 novel"]),
    ("to be, or not to be", ["To be or not to be"]),
]
MISSES = [
    ("London", ["Paris"]),
    ("Paris, France", ["Paris"]),
    ("Paris", ["Paris, France"]),
    ("It is Paris", ["Paris"]),
    ("Pari", ["Paris"]),
    ("", ["Paris"]),
    ("New York", ["NewYork"]),
    ("\u22125", ["5"]),
    ("\u22125", ["-5"]),
    ("cafe", ["caf\u00e9"]),
    ("one", ["1"]),
    ("STRASSE", ["stra\u00dfe"]),
    ("Paris\u2019", ["Paris"]),
]
TOLD = ["<answer>{}</answer>", "<think>well</think> <answer>no</answer> then <answer>{}</answer> it is"]


def test_question_answering_is_what_verl_publishes():
    """53 answers, each told in 2 ways, for rows of 2 forms."""
    for (given, truth), said, form in itertools.product(MATCHES, TOLD, (judged, lambda t: judged({"target": t}))):
        assert qa_exact_match(said.replace("{}", given), form(truth), format_score=FORM) == RIGHT, (given, said)
    for (given, truth), said, form in itertools.product(MISSES, TOLD, (judged, lambda t: judged({"target": t}))):
        assert qa_exact_match(said.replace("{}", given), form(truth), format_score=FORM) == FORM, (given, said)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("Paris", 0.0),
        ("<answer>Paris", 0.0),
        ("Paris</answer>", 0.0),
        ("<Answer>Paris</Answer>", 0.0),
        ("<answer> Paris </answer> or so", 1.0),
        ("<answer>Paris</answer><answer>Rome</answer>", 0.1),
        ("<answer>Paris</answer>" * 10, 1.0),
        ("<answer>Paris</answer>" * 11, 0.25),
        ("<answer>Rome</answer>" * 11, 0.1),
        ("<answer>Paris</answer>" + "</answer>" * 10, 0.25),
        ("<answer><answer>Paris</answer></answer>", 0.1),
    ],
)
def test_answers_are_taken_from_the_last_tag_and_spraying_them_is_worth_a_quarter(completion, score):
    assert qa_exact_match(completion, judged({"target": ["Paris"]}), format_score=FORM) == score


def test_part_of_an_answer_is_enough_where_asked_for():
    row = judged({"target": ["Paris"]})
    assert qa_exact_match("<answer>It is Paris, France</answer>", row, substring=True) == 1.0
    assert qa_exact_match("<answer>London</answer>", row, substring=True, format_score=FORM) == FORM
    assert qa_exact_match("It is Paris", row, substring=True) == 0.0


COUNTED = [
    # answer, right answer, words shared, words of the answer, words of the right one
    ("Paris", "Paris", 1, 1, 1),
    ("Paris France", "Paris", 1, 2, 1),
    ("Paris", "Paris France", 1, 1, 2),
    ("the city of Paris", "Paris", 1, 3, 1),
    ("in Paris, France", "Paris in France", 3, 3, 3),
    ("London", "Paris", 0, 1, 1),
    ("New York City", "New York", 2, 3, 2),
    ("New New York", "New York", 2, 3, 2),
    ("New New", "New New York", 2, 2, 3),
    ("a b c d", "b c", 2, 3, 2),
    ("one two three four", "four three two one", 4, 4, 4),
    ("one two", "three four", 0, 2, 2),
    ("the the the", "Paris", 0, 0, 1),
    ("1,000 dollars", "1000", 1, 2, 1),
    ("Barack Obama.", "barack obama", 2, 2, 2),
    ("President Barack Hussein Obama", "Barack Obama", 2, 4, 2),
    ("well-known", "wellknown", 1, 1, 1),
    ("well known", "well-known", 0, 2, 1),
    ("it was 1984", "1984", 1, 3, 1),
    ("rock & roll", "rock and roll", 2, 2, 3),
    ("July 4, 1776", "4 July 1776", 3, 3, 3),
    ("an apple a day", "apple day", 2, 2, 2),
    ("x x x", "x", 1, 3, 1),
    ("x", "x x x", 1, 1, 3),
    ("\u22125", "-5", 0, 1, 1),
    ("50%", "50 percent", 1, 1, 2),
]
FILLED = [("", ""), ("indeed ", ""), ("", "indeed "), ("indeed ", "indeed ")]
"""A further word in the answer, in the right one, in both."""


def test_f1_is_squads():
    """26 pairs, each in 4 ways, from rows of 2 forms."""
    for (given, truth, shared, many, wanted), (more, also), plain in itertools.product(COUNTED, FILLED, (True, False)):
        common = shared + (1 if more and also else 0)
        precision = common / (many + bool(more)) if many + bool(more) else 0.0
        recall = common / (wanted + bool(also))
        score = 2 * common / (many + bool(more) + wanted + bool(also))
        row = judged(also + truth) if plain else judged({"target": ["something else entirely", also + truth]})
        expected = {"score": score, "precision": precision, "recall": recall}
        if not common:
            expected = dict.fromkeys(expected, 0.0)
        got = f1(f"<answer>{more}{given}</answer>", row)
        assert got == pytest.approx(expected), (given, truth, more, also)


def test_f1_without_an_answer_is_nothing_and_two_empty_ones_are_the_same():
    assert f1("Paris", judged("Paris"))["score"] == 0.0
    assert f1("Paris", judged("Paris"), tagged=False)["score"] == 1.0
    assert f1("<answer>the</answer>", judged("a"))["score"] == 1.0
    assert f1("<answer></answer>", judged("Paris"))["score"] == 0.0
