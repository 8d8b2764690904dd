"""The task of `experiment=tools_quickstart`: a base model that can use a calculator, and mostly does not.

`37*52` is answered by the warm-up text at once, by a guess (`~1800`), or in two turns: a call of the calculator, now
and then with another operator than the one that was asked for, and then what it gave, or that with a hedge (`~1924`).
The reward wants the number alone, so RL has to select one mode in each of two turns, from one reward at the end.
Held-out expressions are kept apart by a hash.
"""

from __future__ import annotations

import json
import operator
import random
import zlib
from pathlib import Path

GUESS_SHARE = 0.6
"""Answers at once. Above a half, so that greedy decoding, too, begins with none right."""
OTHER_SHARE = 0.2
"""Of the calls: with another operator."""
HEDGE_SHARE = 0.65
"""Of what follows a call."""
HELD_OUT_OF_16 = 1
END = "<|eos|>"
CALL_BEGINS = '\n{"name": "calculate", "arguments": {"expression": "'
CALL_ENDS = '"}}\n'
PHRASES = ("<tool_call>", CALL_BEGINS, CALL_ENDS, "</tool_call>")
"""One token each: a call, byte by byte, would be the longest part of an episode."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    f"{{{{ '{END}' if message['role'] == 'assistant' else '>' }}}}{{% endfor %}}"
)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Part = tuple[str, bool]
"""Text, and whether the policy wrote it."""


def result(expression: str) -> str:
    """Of `37*52`: 1924."""
    left, sign, right = expression[:2], expression[2], expression[3:]
    return str(OPERATORS[sign](int(left), int(right)))


def is_held_out(expression: str) -> bool:
    return zlib.crc32(expression.encode()) % 16 < HELD_OUT_OF_16


def sample_expression(rng: random.Random, *, held_out: bool) -> str:
    while True:  # ends: one in sixteen is held out, the others are not
        expression = f"{rng.randrange(10, 100)}{rng.choice(list(OPERATORS))}{rng.randrange(10, 100)}"
        if is_held_out(expression) == held_out:
            return expression


def right_conversation(expression: str, *, called: str = "", said: str = "") -> list[Part]:
    """The two turns that are rewarded.

    Args:
        called, said: instead of the right expression, and the right answer.
    """
    called = called or expression
    call = f"<tool_call>{CALL_BEGINS}{called}{CALL_ENDS}</tool_call>"
    given = result(called)
    return [(f"{expression}>", False), (f"{call}{END}", True), (f"{given}>", False), (f"{said or given}{END}", True)]


def warmup_conversation(rng: random.Random) -> list[Part]:
    """In a random mode; never with a held-out expression."""
    expression = sample_expression(rng, held_out=False)
    if rng.random() < GUESS_SHARE:
        return [(f"{expression}>", False), (f"~{rng.randrange(100, 10_000)}{END}", True)]
    called = expression
    if rng.random() < OTHER_SHARE:
        called = f"{expression[:2]}{rng.choice([sign for sign in OPERATORS if sign != expression[2]])}{expression[3:]}"
    said = f"~{result(called)}" if rng.random() < HEDGE_SHARE else ""
    return right_conversation(expression, called=called, said=said)


def write_sums(directory: str | Path, *, seed: int, train_rows: int = 8192, eval_rows: int = 256) -> None:
    """`train.jsonl` and `heldout.jsonl`: columns `prompt`, in messages, and `answer`; no expression twice."""
    for name, count, held_out in (("train", train_rows, False), ("heldout", eval_rows, True)):
        rng, chosen = random.Random(f"sums-{name}-{seed}"), dict[str, None]()
        while len(chosen) < count:
            chosen[sample_expression(rng, held_out=held_out)] = None
        path = Path(directory) / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ({"prompt": [{"role": "user", "content": each}], "answer": result(each)} for each in chosen)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
