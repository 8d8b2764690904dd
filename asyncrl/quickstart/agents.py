"""The tasks of `experiment=tools_quickstart`, `python_quickstart` and `search_quickstart`, with base models that can
use a tool but mostly do not.

The warm-up text answers a question either at once, with a guess, or in two turns: first a tool call, sometimes for a
different question, then the tool's result, or that result with a hedge (`~1924`, `maybe bdcaf`). Only the right answer
is rewarded, so RL has to select one mode in each of two turns from a single reward at the end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.quickstart.modes import is_held_out
from asyncrl.quickstart.questions import Facts, Questions, Sums

GUESS_SHARE = 0.6
"""Share of conversations that answer at once: above a half, so that even greedy decoding starts with none right."""
OTHER_SHARE = 0.2
"""Share of the calls that ask a different question."""
HEDGE_SHARE = 0.65
"""Share of the answers after a call that have a hedge."""
END = "<|eos|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    f"{{{{ '{END}' if message['role'] == 'assistant' else '>' }}}}{{% endfor %}}"
)
Part = tuple[str, bool]
"""A text, and whether the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The format of calls and answers, and the questions."""

    questions: Questions
    phrases: tuple[str, ...]
    """Phrases that are one token each: byte by byte they would be the longest part of an episode."""
    call: tuple[str, str]
    """Text before and after the question in a tool call."""
    given: str
    """The tool's response as the policy reads it, with the fields `{asked}` and `{answer}`."""
    said: tuple[str, str]
    """Text before and after an answer."""
    hedge: str
    """Prefix of an answer that makes it a wrong one."""

    def sample(self, rng: random.Random, *, held_out: bool) -> str:
        """Draw a question."""
        while True:  # ends: one in sixteen is held out, the others are not
            question = self.questions.draw(rng)
            if is_held_out(question) == held_out:
                return question

    def right_conversation(self, question: str, *, called: str = "", hedge: str = "") -> list[Part]:
        """The two turns that are rewarded, unless an argument makes them wrong.

        Args:
            called: the question of the tool call, if not `question`; makes the conversation a wrong one.
            hedge: prefix of the answer; likewise makes it wrong.
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
        """A conversation in a random mode. Never uses a held-out question."""
        question = self.sample(rng, held_out=False)
        if rng.random() < GUESS_SHARE:
            return [(f"{question}>", False), (self.questions.guess(rng).join(self.said), True)]
        called = self.questions.other(rng, question) if rng.random() < OTHER_SHARE else question
        return self.right_conversation(question, called=called, hedge=self.hedge if rng.random() < HEDGE_SHARE else "")

    def stamp(self) -> tuple[Any, ...]:
        """What a base model depends on, in addition to its recipe."""
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
"""Agents by the name that is in their recipe."""


def write_rows(agent: Agent, directory: str | Path, *, seed: int, train_rows: int = 4096, eval_rows: int = 256) -> None:
    """Write `train.jsonl` and `heldout.jsonl`, with columns `prompt` (messages) and `answer`, each question once. If
    the answers are facts, also write `corpus.jsonl` with all facts."""
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
