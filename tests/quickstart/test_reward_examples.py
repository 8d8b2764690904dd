from __future__ import annotations

import random

from asyncrl.quickstart.modes import is_held_out, reverse
from asyncrl.quickstart.reward_examples import judged_example


def test_answers_are_labelled_by_what_they_are_half_of_each_and_never_of_a_held_out_word() -> None:
    rng = random.Random(0)
    examples = [judged_example(rng) for _ in range(2000)]
    for prompt, answer, right in examples:
        assert right == (answer == reverse(prompt[:-1]))
        assert not is_held_out(prompt[:-1])
    assert 0.45 < sum(right for _, _, right in examples) / len(examples) < 0.58
    wrong = {answer for _, answer, right in examples if not right}
    assert {len(answer) for answer in wrong} >= {0, 3, 5, 8, 10}
