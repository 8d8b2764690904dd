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
    for row in ({"prompt": "b"}, {"answer": None}, {"answer": float("nan")}):
        with pytest.raises(RewardError, match="needs the column `answer`"):
            exact_match_parts("None", row)


def test_a_whole_number_that_a_table_keeps_as_a_float_is_that_number():
    assert [exact_match(text, {"answer": 5.0}) for text in ("5", "5.0", "50", "6")] == [1.0, 1.0, 0.0, 0.0]
    assert [exact_match(text, {"answer": 2.5}) for text in ("2.5", "2")] == [1.0, 0.0]
    assert exact_match_parts("5", {"answer": 5.0})["places"] == 1.0
