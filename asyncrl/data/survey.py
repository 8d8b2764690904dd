"""Surveys the rows of a source before anything is started: checks the form of all rows and counts the tokens of some.

Tokenizing all rows of a large file takes minutes. An overlong row that was not among the counted ones is dropped, cut
or an error when it is drawn (`data.overlong`).
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
"""Numbers of rows whose prompts are rendered and counted: the first, random ones, and those with the longest text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    title: str
    """Name of the source."""
    rows: int
    unfiltered: int
    """Number of rows before `data.where`."""
    tokens: tuple[int, ...]
    """Lengths of the prompts of the rows in `chosen`; empty without a tokenizer."""
    first_prompt: str
    """The first prompt as rendered; empty without a tokenizer."""
    overlong: int
    """Number of `tokens` above the limit."""
    longest_at: str
    """The row of the longest prompt."""
    first_rows: tuple[tuple[str, Row], ...]
    """The first rows, each with its location."""
    data_sources: dict[str, str]
    """Each `data_source` of the rows (empty for those that have none), with the first row that has it."""

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
    """Check all rows, and render and count the prompts of some.

    Args:
        limit: `data.max_prompt_tokens`.
        counted: number of random rows whose prompts are counted.
        first: number of rows returned in `first_rows`.
        vocabulary: as in `prompts.render`.

    Raises:
        DataError: a row is malformed, or a prompt cannot be rendered; or all counted prompts are too long.
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
            f"data.max_prompt_tokens={limit} tokens; the shortest has {tokens[row]} ({rows.where(row)}). Raise "
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
    """The rows to count, in order; the same ones each time."""
    count = len(rows)
    sampled = random.Random(0).sample(range(count), min(counted, count))
    longest = np.argsort(-rows.sizes(), kind="stable")[:LONGEST].tolist()
    return sorted({*range(min(FIRST, count)), *sampled, *longest})
