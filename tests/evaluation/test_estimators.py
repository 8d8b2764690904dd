from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from asyncrl.evaluation.answers import EXTRACTORS, answer_of, boxed
from asyncrl.evaluation.estimators import SUBSETS, best_at_k, majority_at_k, pass_at_k, subsets


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_in_which_a_sample_passed(samples):
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        drawn = list(itertools.combinations([1] * passed + [0] * (samples - passed), k))
        assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(max, drawn)) / len(drawn), abs=1e-12)


def test_pass_at_k_of_very_many_samples_is_a_number():
    assert pass_at_k(100_000, 7, 50_000) == pytest.approx(1 - 0.5**7, abs=1e-4)


def test_best_at_k_is_the_mean_best_of_all_subsets():
    generator = random.Random(3)
    for _ in range(60):
        scores = [generator.choice([-1.0, 0.0, 0.25, 0.5, 1.0, generator.gauss(0, 2)]) for _ in range(6)]
        for k in range(1, 7):
            drawn = [max(subset) for subset in itertools.combinations(scores, k)]
            assert best_at_k(scores, k) == pytest.approx(math.fsum(drawn) / len(drawn), abs=1e-9)


def test_best_at_k_of_right_and_wrong_is_pass_at_k():
    for passed, k in itertools.product(range(6), range(1, 6)):
        assert best_at_k([1.0] * passed + [0.0] * (5 - passed), k) == pytest.approx(pass_at_k(5, passed, k), abs=1e-12)


def vote(subset: list[tuple[str | None, float]]) -> float:
    """By the words of the definition, for one subset."""
    votes = Counter(answer for answer, _ in subset if answer is not None)
    if not votes:
        return sum(score for _, score in subset) / len(subset)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    means = [[score for answer, score in subset if answer == winner] for winner in winners]
    return sum(sum(scores) / len(scores) for scores in means) / len(winners)


def test_majority_at_k_is_the_mean_of_the_votes_of_all_subsets_ties_and_abstentions_included():
    generator = random.Random(5)
    for _ in range(30):
        row = [(generator.choice(["1", "2", "x", None]), generator.choice([0.0, 0.5, 1.0])) for _ in range(6)]
        answers, scores = [answer for answer, _ in row], [score for _, score in row]
        for k in range(1, 7):
            drawn = [vote(list(subset)) for subset in itertools.combinations(row, k)]
            assert majority_at_k(answers, scores, k, seed=0) == pytest.approx(sum(drawn) / len(drawn), abs=1e-9)


def test_a_majority_of_many_samples_is_estimated_from_drawn_subsets_the_same_for_the_same_seed():
    answers, scores = ["a"] * 18 + ["b"] * 14, [1.0] * 18 + [0.0] * 14
    wins = sum(
        math.comb(18, a) * math.comb(14, 8 - a) * (1.0 if a > 4 else 0.5 if a == 4 else 0.0) for a in range(9)
    ) / math.comb(32, 8)
    found = [majority_at_k(answers, scores, 8, seed) for seed in range(20)]
    assert sum(found) / len(found) == pytest.approx(wins, abs=0.03)  # 20 * 256 draws: 1 sigma is below 0.006
    assert len(set(found)) > 1 and majority_at_k(answers, scores, 8, 7) == found[7]


def test_drawn_subsets_have_no_sample_twice_and_the_stream_of_a_seed_stays():
    drawn = subsets(40, 5, seed=1)
    assert drawn.shape == (SUBSETS, 5)
    assert all(len(set(subset)) == 5 for subset in drawn.tolist())
    assert subsets(5, 2, seed=9).tolist() == [list(pair) for pair in itertools.combinations(range(5), 2)]
    assert drawn[0].tolist() == [3, 5, 24, 27, 26]


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_that_no_subset_has_is_refused(k):
    for estimate in (
        lambda: pass_at_k(3, 1, k),
        lambda: best_at_k([0.0] * 3, k),
        lambda: majority_at_k(["a"] * 3, [0.0] * 3, k, 0),
    ):
        with pytest.raises(ValueError, match=f"got {k}"):
            estimate()


@pytest.mark.parametrize(
    "extract, text, answer",
    [
        ("boxed", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{3} and then \boxed{4", "3"),
        ("boxed", "none", None),
        ("tag", "<answer>a</answer> <answer> Paris \n France</answer>", "Paris France"),
        ("hash", "6 * 7\n#### $1,042.\n", "1042"),
        ("number", "from 3 to -1,200.50 m", "-1200.50"),
        ("number", "none", None),
        ("text", "  yes.\n", "yes"),
        ("text", "  \n", None),
        ("auto", r"#### 3 \boxed{4} <answer>5</answer>", "5"),
        ("auto", r"#### 3 \boxed{4}", "4"),
        ("auto", "no answer", None),
        ("auto", r"\boxed{1, 2}", "1, 2"),
    ],
)
def test_answers_are_found_in_the_forms_that_models_give_them(extract, text, answer):
    assert answer_of(text, extract) == answer


def test_every_extractor_takes_any_text():
    generator = random.Random(1)
    for name in EXTRACTORS:
        for _ in range(300):
            answer_of("".join(generator.choices("\\boxed{}<answer>/#123,. \n", k=30)), name)
    assert boxed("\\boxed{" * 50) is None
