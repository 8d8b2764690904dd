"""What is found out about the rows of a source before anything is started: the form of all, the length of some.

Tokenizing all of a large file takes minutes; a row that is over-long and not among those looked at is dropped, cut or
an error when it is drawn (`data.overlong`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.chat.base import PromptRenderer
from asyncrl.data.prompts import render
from asyncrl.data.rows.base import Row
from asyncrl.data.rows.view import PromptRows
from asyncrl.errors import DataError

FIRST, SAMPLED, LONGEST = 4, 256, 64
"""Rows whose prompts are rendered and counted: the first ones, random ones, and the longest by their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    title: str
    """What was looked at."""
    rows: int
    unfiltered: int
    """Rows there are, `data.where` or not."""
    tokens: tuple[int, ...]
    """Of the prompts that were looked at, as in `chosen`; empty without a tokenizer."""
    first_prompt: str
    """As rendered; empty without a tokenizer."""
    overlong: int
    """Of `tokens`, how many are over the limit."""
    longest_at: str
    """The row of the longest prompt."""
    first_rows: tuple[tuple[str, Row], ...]
    """Where it is, and the row, of the first ones."""
    data_sources: dict[str, str]
    """Each `data_source` of the rows (empty for those that have none), with the row it stands in first."""

    @property
    def longest(self) -> int:
        return max(self.tokens, default=0)


def survey(
    rows: PromptRows,
    tokenizer: PromptRenderer | None,
    *,
    limit: int,
    counted: int = SAMPLED,
    first: int = FIRST,
    vocabulary: int | None = None,
) -> Survey:
    """Check all rows, and the prompts of some.

    Args:
        limit: `data.max_prompt_tokens`.
        counted: random rows whose prompts are counted.
        first: how many rows come back.
        vocabulary: as in `prompts.render`.

    Raises:
        DataError: a row has no usable form, or a prompt cannot be rendered; or all that were counted are too long.
    """
    data_sources = rows.check()
    looked_at = chosen(rows, counted) if tokenizer else ()
    prompts = {row: render(tokenizer, rows[row], rows.where(row), vocabulary) for row in looked_at} if tokenizer else {}
    tokens = {row: len(ids) for row, (_, ids) in prompts.items()}
    overlong = [row for row in tokens if tokens[row] > limit]
    if tokens and len(overlong) == len(tokens):
        row = min(tokens, key=lambda row: (tokens[row], row))
        raise DataError(
            f"{rows.source.title}: all {len(tokens)} prompts that were looked at have more than "
            f"data.max_prompt_tokens={limit} tokens, the shortest {tokens[row]} ({rows.where(row)}). Raise "
            "data.max_prompt_tokens"
        )
    return Survey(
        title=rows.source.title,
        rows=len(rows),
        unfiltered=rows.unfiltered,
        tokens=tuple(tokens.values()),
        first_prompt=prompts[0][0] if prompts else "",
        overlong=len(overlong),
        longest_at=rows.where(max(tokens, key=lambda row: (tokens[row], -row))) if tokens else "",
        first_rows=tuple((rows.where(row), rows[row]) for row in range(min(first, len(rows)))),
        data_sources=data_sources,
    )


def chosen(rows: PromptRows, counted: int = SAMPLED) -> Sequence[int]:
    """Rows to look at, in order; the same ones each time."""
    count = len(rows)
    sampled = random.Random(0).sample(range(count), min(counted, count))
    longest = np.argsort(-rows.sizes(), kind="stable")[:LONGEST].tolist()
    return sorted({*range(min(FIRST, count)), *sampled, *longest})
