"""Questions of the quickstart's agents: sums, and facts from a corpus."""

from __future__ import annotations

import itertools
import operator
import random
from typing import Protocol

from asyncrl.quickstart.modes import LETTERS


class Questions(Protocol):
    def draw(self, rng: random.Random) -> str:
        """Draw any question."""
        ...

    def answer(self, question: str) -> str: ...

    def other(self, rng: random.Random, question: str) -> str:
        """A different question, as a careless policy would ask it."""
        ...

    def guess(self, rng: random.Random) -> str:
        """A random text that has the form of an answer."""
        ...


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Sums:
    """Arithmetic questions, such as `37*52` with the answer 1924."""

    def draw(self, rng: random.Random) -> str:
        return f"{rng.randrange(10, 100)}{rng.choice(list(OPERATORS))}{rng.randrange(10, 100)}"

    def answer(self, question: str) -> str:
        left, sign, right = question[:2], question[2], question[3:]
        return str(OPERATORS[sign](int(left), int(right)))

    def other(self, rng: random.Random, question: str) -> str:
        sign = rng.choice([sign for sign in OPERATORS if sign != question[2]])
        return f"{question[:2]}{sign}{question[3:]}"

    def guess(self, rng: random.Random) -> str:
        return f"~{rng.randrange(100, 10_000)}"


class Facts:
    """Keys such as `bdca`, each with a value that only the corpus gives. No letter repeats in either (`modes`)."""

    KEY, VALUE = 4, 5
    """Lengths in letters. They differ, so that no key occurs in another key's passage."""

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.sample(LETTERS, self.KEY))

    def answer(self, question: str) -> str:
        return "".join(random.Random(f"fact-{question}").sample(LETTERS, self.VALUE))

    def other(self, rng: random.Random, question: str) -> str:
        return self.draw(rng)

    def guess(self, rng: random.Random) -> str:
        return "".join(rng.sample(LETTERS, self.VALUE))

    def all(self) -> list[str]:
        """Every possible key."""
        return ["".join(letters) for letters in itertools.permutations(LETTERS, self.KEY)]
