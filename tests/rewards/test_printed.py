"""What user code prints in a reward process."""

from __future__ import annotations

import io

from asyncrl.rewards.printed import LINES, PERIOD_S, LimitedStream


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_reward_that_prints_floods_nothing_and_the_rest_is_counted():
    target, clock = io.StringIO(), Clock()
    stream = LimitedStream(target, clock)
    for place in range(1000):
        print("line", place, file=stream)
    lines = target.getvalue().splitlines()
    assert lines[:LINES] == [f"line {place}" for place in range(LINES)]
    assert lines[LINES:] == [f"(more that user code prints within {PERIOD_S:g} s is left out)"]
    clock.now = PERIOD_S
    print("again", file=stream)
    assert target.getvalue().splitlines()[LINES + 1 :] == [
        f"({1000 - LINES} lines that user code printed were left out)",
        "again",
    ]


def test_a_long_line_is_cut_and_pieces_of_a_line_stay_together():
    target = io.StringIO()
    stream = LimitedStream(target, Clock())
    print("a", end="", file=stream)
    print("b", file=stream)
    print("x" * 100_000, file=stream)
    first, second = target.getvalue().splitlines()
    assert first == "ab" and 1000 < len(second) < 5000
