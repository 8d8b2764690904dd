from __future__ import annotations

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards.exact_match import exact_match, exact_match_parts


@pytest.mark.parametrize(
    ("completion", "correct", "places"),
    [(" edcba ", 1.0, 1.0), ("abcde", 0.0, 0.2), ("edcb", 0.0, 0.8), ("edcbaa", 0.0, 5 / 6), ("", 0.0, 0.0)],
)
def test_the_parts_are_the_whole_answer_and_the_share_of_places(completion: str, correct: float, places: float):
    parts = exact_match_parts(completion, {"answer": "edcba"})
    assert parts == {"score": correct, "correct": correct, "places": pytest.approx(places)}
    assert exact_match(completion, {"answer": "edcba"}) == correct


def test_a_row_without_an_answer_is_an_error_and_no_zero():
    with pytest.raises(RewardError, match="needs the column `answer`"):
        exact_match_parts("a", {"prompt": "b"})
