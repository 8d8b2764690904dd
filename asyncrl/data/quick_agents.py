"""The tasks of `experiment=tools_quickstart`, `python_quickstart` and `search_quickstart`: base models that can use a
tool, and mostly do not.

A question is answered by the warm-up text at once, by a guess, or in two turns: a call, now and then of something else
than was asked, and then what it gave, or that with a hedge (`~1924`, `maybe bdcaf`). The reward wants the right answer
alone, so RL has to select one mode in each of two turns, from one reward at the end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.data.quick_questions import Facts, Questions, Sums, is_held_out

GUESS_SHARE = 0.6
"""Answers at once. Above a half, so that greedy decoding, too, begins with none right."""
OTHER_SHARE = 0.2
"""Of the calls: of another question."""
HEDGE_SHARE = 0.65
"""Of what follows a call."""
END = "<|eos|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    f"{{{{ '{END}' if message['role'] == 'assistant' else '>' }}}}{{% endfor %}}"
)
Part = tuple[str, bool]
"""Text, and whether the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How calls and answers are written, and what is asked."""

    questions: Questions
    phrases: tuple[str, ...]
    """One token each: byte by byte they would be the longest part of an episode."""
    call: tuple[str, str]
    """Before and behind what is asked of the tool."""
    given: str
    """What the policy reads then, with `{asked}` and `{answer}`."""
    said: tuple[str, str]
    """Before and behind an answer."""
    hedge: str
    """Before an answer: it is a wrong one then."""

    def sample(self, rng: random.Random, *, held_out: bool) -> str:
        """A question."""
        while True:  # ends: one in sixteen is held out, the others are not
            question = self.questions.draw(rng)
            if is_held_out(question) == held_out:
                return question

    def right_conversation(self, question: str, *, called: str = "", hedge: str = "") -> list[Part]:
        """The two turns that are rewarded.

        Args:
            called: instead of the question, which makes it a wrong one.
            hedge: likewise, before the answer.
        """
        called = called or question
        answer = self.questions.answer(called)
        return [
            (f"{question}>", False),
            (called.join(self.call), True),
            (self.given.format(asked=called, answer=answer), False),
            (f"{hedge}{answer}".join(self.said), True),
        ]

    def warmup_conversation(self, rng: random.Random) -> list[Part]:
        """In a random mode; never with a question that is held out."""
        question = self.sample(rng, held_out=False)
        if rng.random() < GUESS_SHARE:
            return [(f"{question}>", False), (self.questions.guess(rng).join(self.said), True)]
        called = self.questions.other(rng, question) if rng.random() < OTHER_SHARE else question
        return self.right_conversation(question, called=called, hedge=self.hedge if rng.random() < HEDGE_SHARE else "")

    def stamp(self) -> tuple[Any, ...]:
        """What a base model depends on, beside its recipe."""
        shares = (GUESS_SHARE, OTHER_SHARE, HEDGE_SHARE)
        form = (self.phrases, self.call, self.given, self.said, self.hedge)
        return (type(self.questions).__name__, *form, *shares)


BEGIN, CLOSE = '\n{"name": "calculate", "arguments": {"expression": "', '"}}\n'
INFORMATION, INFORMED = "\n<information>\n[1] ", "\n</information>\n"
INTERPRETER, INTERPRETED = "\n<interpreter>\n", "\n</interpreter>\n"
AGENTS = {
    "calculator": Agent(
        questions=Sums(),
        phrases=("<tool_call>", BEGIN, CLOSE, "</tool_call>"),
        call=(f"<tool_call>{BEGIN}", f"{CLOSE}</tool_call>{END}"),
        given="{answer}>",
        said=("", END),
        hedge="~",
    ),
    "python": Agent(
        questions=Sums(),
        phrases=("<code>", "</code>", INTERPRETER, INTERPRETED),
        call=("<code>", "</code>"),
        given=f"{INTERPRETER}{{answer}}{INTERPRETED}",
        said=("", END),
        hedge="~",
    ),
    "search": Agent(
        questions=Facts(),
        phrases=("<search>", "</search>", "<answer>", "</answer>", "maybe ", INFORMATION, INFORMED),
        call=("<search>", "</search>"),
        given=f"{INFORMATION}{{asked}}\n{{answer}}{INFORMED}",
        said=("<answer>", "</answer>"),
        hedge="maybe ",
    ),
}
"""By the name that their recipe has."""


def write_rows(agent: Agent, directory: str | Path, *, seed: int, train_rows: int = 4096, eval_rows: int = 256) -> None:
    """`train.jsonl` and `heldout.jsonl`: columns `prompt`, in messages, and `answer`; no question twice. And, where
    the answers are facts, `corpus.jsonl` with all there are."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("train", train_rows, False), ("heldout", eval_rows, True)):
        rng, chosen = random.Random(f"{name}-{seed}"), dict[str, None]()
        while len(chosen) < count:
            chosen[agent.sample(rng, held_out=held_out)] = None
        _write(
            folder / f"{name}.jsonl",
            (
                {"prompt": [{"role": "user", "content": each}], "answer": agent.questions.answer(each)}
                for each in chosen
            ),
        )
    if isinstance(agent.questions, Facts):
        facts = agent.questions
        _write(folder / "corpus.jsonl", ({"title": key, "text": facts.answer(key)} for key in facts.all()))


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
