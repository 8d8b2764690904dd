"""Checks before anything is started: the form of every row, and the rendering of some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncrl.data.survey import Counted, all_too_long, chosen
from asyncrl.errors import OverlongError
from asyncrl.sft.examples import Encoder, Example
from asyncrl.sft.rows import SftRows, eval_source, train_sources
from asyncrl.sft.settings import SftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked(Counted):
    """The result for one source."""

    loss_tokens: tuple[int, ...]
    """Loss tokens of those that are trained on."""
    overlong: tuple[str, ...]
    """Locations of the overlong rows, the longest first."""
    begun_otherwise: int
    """Number of rows with a turn that does not begin as in a rollout; see `Supervised.as_asked`."""
    first: Example
    """The first row that is not dropped."""
    first_at: str


def look(given: SftConfig, encoder: Encoder) -> list[Looked]:
    """Check the training sources, then the evaluation source.

    Raises:
        DataError: a row is malformed or cannot be rendered, or all rows of a source are too long.
    """
    trained, held_out = train_sources(given), eval_source(given)
    found = [SftRows(source, given.data) for source in (*trained, *([held_out] if held_out else []))]
    for rows in found[: len(trained)] if given.data.order_by else ():
        rows.ranks(given.data.order_by)
    return [_looked(rows, encoder, given) for rows in found]


def _looked(rows: SftRows, encoder: Encoder, given: SftConfig) -> Looked:
    rows.check()
    limit = given.data.max_tokens
    found: dict[int, Example] = {}
    lengths: dict[int, int] = {}
    for row in chosen(rows.text_sizes()):
        whole = encoder.whole(rows.form(row), rows.where(row))
        lengths[row] = whole.rendered
        with contextlib.suppress(OverlongError):
            found[row] = encoder.fitted(whole, rows.form(row), rows.where(row))
    overlong = sorted((row for row in lengths if lengths[row] > limit), key=lambda row: -lengths[row])
    if not found:
        raise all_too_long(rows, lengths, "rows", "data.max_tokens", limit)
    first = min(found)
    looked = Looked(
        title=rows.source.title,
        rows=len(rows),
        unfiltered=rows.unfiltered,
        tokens=tuple(lengths.values()),
        loss_tokens=tuple(each.loss_tokens for each in found.values()),
        overlong=tuple(f"{rows.where(row)}, {lengths[row]:,}" for row in overlong),
        begun_otherwise=sum(not each.as_asked for each in found.values()),
        first=found[first],
        first_at=rows.where(first),
    )
    rows.close()
    return looked


def lines(looked: Sequence[Looked], given: SftConfig) -> Iterator[str]:
    """The result as lines for people, before a start."""
    for each in looked:
        kept = f" of {each.unfiltered:,}" if each.rows < each.unfiltered else ""
        share = sum(each.loss_tokens) / max(1, len(each.loss_tokens))
        yield (
            f"{each.title}: {each.rows:,}{kept} rows, all of a form that can be used; of {len(each.tokens):,} rendered "
            f"the longest has {max(each.tokens):,} tokens, the mean {sum(each.tokens) / len(each.tokens):,.0f}, and "
            f"{share:,.0f} of them carry loss"
        )
        if each.overlong:
            yield (
                f"{each.title}: {len(each.overlong)} of {len(each.tokens)} rows looked at have more than "
                f"data.max_tokens={given.data.max_tokens} (the longest: {each.overlong[0]}): "
                f"data.overlong={given.data.overlong}"
            )
        if each.begun_otherwise:
            yield (
                f"{each.title}: {each.begun_otherwise} of {len(each.tokens)} rows have a turn without reasoning, but "
                "the renderer's generation prompt begins one: rollouts would begin differently from what is learned. "
                "Give the messages `reasoning_content`, or try model.chat.enable_thinking=false"
            )


def runs(example: Example) -> Iterator[tuple[list[int], bool]]:
    """Split into runs of tokens that are all context, or all trained on, in order."""
    start = 0
    for place in range(1, len(example.token_ids) + 1):
        if place == len(example.token_ids) or example.loss_mask[place] != example.loss_mask[start]:
            yield example.token_ids[start:place].tolist(), bool(example.loss_mask[start])
            start = place
