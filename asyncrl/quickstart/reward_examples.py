"""Right and wrong answers to the quickstart's task, as training data for a reward model."""

from __future__ import annotations

import random

from asyncrl.quickstart.modes import LETTERS, reverse, sample_word


def judged_example(rng: random.Random) -> tuple[str, str, bool]:
    """Return `(prompt, answer, whether the answer is the reversal)`, half of each kind; never a held-out word.

    Wrong answers are the other modes of the task, near misses (one letter changed, two swapped) and wrong lengths: the
    answers that a policy trained against the reward model will try.
    """
    word = sample_word(rng, held_out=False)
    right = reverse(word)
    answer = right if rng.random() < 0.5 else wrong_answer(rng, word)
    return f"{word}>", answer, answer == right


def wrong_answer(rng: random.Random, word: str) -> str:
    """Draw a wrong answer, which occasionally happens to be the right one."""
    letters = list(reverse(word))
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice((word, "".join(sorted(word)), word[1:] + word[0]))
    if kind == 1:
        return "".join(rng.choices(LETTERS, k=len(word)))
    if kind in (2, 3):
        letters[rng.randrange(len(word))] = rng.choice(LETTERS)
    elif kind == 4:
        first, second = rng.sample(range(len(word)), 2)
        letters[first], letters[second] = letters[second], letters[first]
    else:
        letters += rng.choices(LETTERS, k=len(word))
        letters = letters[: rng.choice([n for n in range(2 * len(word) + 1) if n != len(word)])]
    return "".join(letters)
