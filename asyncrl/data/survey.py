"""Surveys the rows of a source before anything is started: checks the form of all rows and counts the tokens of some.

Tokenizing all rows of a large file takes minutes. An overlong row that was not among the counted ones is dropped, cut
or an error when it is drawn (`data.overlong`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import PromptRenderer, added_tokens
from asyncrl.data.prompts import render
from asyncrl.data.rows.base import Row
from asyncrl.data.rows.view import PromptRows, SourceRows
from asyncrl.errors import DataError

FIRST, SAMPLED, LONGEST = 4, 256, 64
"""Numbers of rows that are rendered and counted: the first, random ones, and those with the longest text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What is known of a source before anything is started."""

    title: str
    """Name of the source."""
    rows: int
    unfiltered: int
    """Number of rows before `data.where`."""
    tokens: tuple[int, ...]
    """Lengths of the rows in `chosen` as rendered; empty without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey(Counted):
    """What is known of a source of prompts."""

    first_prompt: str
    """The first prompt as rendered; empty without a tokenizer."""
    overlong: int
    """Number of `tokens` above the limit."""
    rendered_at: str
    """The first row over the limit whose prompt is a text that was rendered beforehand, which cannot be cut; empty if
    there is none."""
    longest_at: str
    """The row of the longest prompt."""
    first_rows: tuple[tuple[str, Row], ...]
    """The first rows, each with its location."""
    data_sources: dict[str, str]
    """Each `data_source` of the rows (empty for those that have none), with the first row that has it."""

    asked: str = ""
    """The environment whose first requests `first_prompt` and `tokens` are; empty if they are the rows' own prompts."""
    longest_row: Row = field(default_factory=dict)
    """The row at `longest_at`; empty without a tokenizer."""

    @property
    def longest(self) -> int:
        return max(self.tokens, default=0)


def survey(
    rows: PromptRows,
    tokenizer: PromptRenderer | None,
    *,
    limit: int | None,
    counted: int = SAMPLED,
    first: int = FIRST,
    vocabulary: int | None = None,
) -> Survey:
    """Check all rows, and render and count the prompts of some.

    Args:
        limit: `data.max_prompt_tokens`; None if the environment makes prompts of its own.
        counted: number of random rows whose prompts are counted.
        first: number of rows returned in `first_rows`.
        vocabulary: as in `prompts.render`.

    Raises:
        DataError: a row is malformed, or a prompt cannot be rendered; or all counted prompts are too long.
    """
    data_sources = rows.check()
    looked_at = chosen(rows.sizes(), counted) if tokenizer else ()
    prompts = {row: render(tokenizer, rows[row], rows.where(row), vocabulary) for row in looked_at} if tokenizer else {}
    tokens = {row: len(ids) for row, (_, ids) in prompts.items()}
    overlong = [row for row in tokens if limit is not None and tokens[row] > limit]
    if limit is not None and tokens and len(overlong) == len(tokens):
        raise all_too_long(rows, tokens, "prompts", "data.max_prompt_tokens", limit)
    longest = max(tokens, key=lambda row: (tokens[row], -row), default=0)
    return Survey(
        title=rows.source.title,
        rows=len(rows),
        unfiltered=rows.unfiltered,
        tokens=tuple(tokens.values()),
        first_prompt=prompts[0][0] if prompts else "",
        overlong=len(overlong),
        rendered_at=next(
            (rows.where(row) for row in overlong if _is_rendered(rows[row], prompts[row][1], tokenizer)), ""
        ),
        longest_at=rows.where(longest) if tokens else "",
        longest_row=rows[longest] if tokens else {},
        first_rows=tuple((rows.where(row), rows[row]) for row in range(min(first, len(rows)))),
        data_sources=data_sources,
    )


def _is_rendered(row: Row, ids: NDArray[np.int32], tokenizer: PromptRenderer | None) -> bool:
    """Whether the prompt is a text with the markers of a chat template."""
    if tokenizer is None or not isinstance(row["prompt"], str):
        return False
    return not {*tokenizer.special_ids}.isdisjoint(ids[len(added_tokens(tokenizer)[0]) :].tolist())


def chosen(sizes: NDArray[np.int64], counted: int = SAMPLED) -> Sequence[int]:
    """The rows to count, in order; the same ones each time.

    Args:
        sizes: approximate length of the text of each row.
    """
    count = len(sizes)
    sampled = random.Random(0).sample(range(count), min(counted, count))
    longest = np.argsort(-sizes, kind="stable")[:LONGEST].tolist()
    return sorted({*range(min(FIRST, count)), *sampled, *longest})


def all_too_long(rows: SourceRows, tokens: Mapping[int, int], what: str, setting: str, limit: int) -> DataError:
    """For a source of which every row in `tokens` (row -> length) is over the limit, so that nothing could be drawn."""
    row = min(tokens, key=lambda row: (tokens[row], row))
    return DataError(
        f"{rows.source.title}: all {len(tokens)} {what} that were looked at have more than {setting}={limit} tokens; "
        f"the shortest has {tokens[row]} ({rows.where(row)}). Raise {setting}"
    )
