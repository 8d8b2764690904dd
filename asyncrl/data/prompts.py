"""The endless stream of prompts: rows in drawing order, rendered and tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import ChatError, Message, PromptRenderer, added_tokens, ids_to_go_on_from
from asyncrl.data.dataset import Dataset
from asyncrl.data.rows.base import Row
from asyncrl.data.rows.messages import tools_of
from asyncrl.data.truncation import cut_messages, cut_text
from asyncrl.errors import DataError, OverlongError
from asyncrl.types import Prompt

CANNOT_BE_CUT = "is too little, or was rendered beforehand, so that it cannot be told apart"
CACHED_ROWS = 16_384
"""Limit on the tokenized rows kept in memory, so that the tokenizer need not run once per group, on the loop's core."""


class PromptSource:
    """`source[index]` is the prompt at position `index` of the stream (see `drawing/order.py`).

    Args:
        shuffle: draw rows in an order seeded by (seed, epoch) rather than in the order of the files.
        max_prompt_tokens: limit on prompts; None for none.
        overlong: what to do with longer ones; see `data.overlong`.
        vocabulary: as in `render`.
    """

    def __init__(
        self,
        data: Dataset,
        tokenizer: PromptRenderer,
        *,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int | None,
        overlong: str = "error",
        vocabulary: int | None = None,
    ) -> None:
        self._data = data
        self._order = data.order(seed=seed, shuffle=shuffle)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._max_tokens, self._overlong = max_prompt_tokens, overlong
        self._overlong_drawn = 0
        self._tokenized: dict[int, tuple[str, NDArray[np.int32]]] = {}
        self._cut_rows: dict[int, tuple[str, NDArray[np.int32]]] = {}

    @property
    def rows(self) -> int:
        return len(self._data)

    @property
    def rows_by_source(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self._data.parts)

    def data_sources(self) -> Iterator[str]:
        """The data source of each row, in the order of the files. Raises DataError for a row that cannot be read."""
        return (name for part in self._data.parts for name in part.data_sources())

    def where(self, row: int) -> str:
        """Describe the location of `Prompt.row` for a person."""
        return self._data.where(row)

    def __getitem__(self, index: int) -> Prompt:
        """Raises DataError naming the row if it is unusable, is chat without a template, or is longer than
        `max_prompt_tokens` and that is an error. Raises OverlongError if such a row is to be dropped."""
        drawn = self._order[index]
        row = self._data.starts[drawn.source] + drawn.row
        columns = self._data[row]
        text, token_ids = self._fit(row, columns, *self._tokenize(row, columns))
        return Prompt(
            index=index,
            epoch=drawn.epoch,
            row=row,
            source=self._data.parts[drawn.source].source.name,
            token_ids=token_ids,
            text=text,
            where=self.where(row),
            columns=columns,
        )

    def count_overlong(self) -> None:
        """Count a prompt that turned out to be too long as its environment renders it."""
        self._overlong_drawn += 1

    def stats(self) -> dict[str, float]:
        """Prompts over `max_prompt_tokens` drawn so far, dropped or cut."""
        return {"overlong_prompts": float(self._overlong_drawn)}

    def close(self) -> None:
        self._data.close()

    def _tokenize(self, row: int, columns: Row) -> tuple[str, NDArray[np.int32]]:
        known = self._tokenized.get(row)
        if known is None:
            known = render(self._tokenizer, columns, self.where(row), self._vocabulary)
            if len(self._tokenized) >= CACHED_ROWS:
                del self._tokenized[next(iter(self._tokenized))]
            self._tokenized[row] = known
        return known

    def _fit(self, row: int, columns: Row, text: str, token_ids: NDArray[np.int32]) -> tuple[str, NDArray[np.int32]]:
        if self._max_tokens is None or len(token_ids) <= self._max_tokens:
            return text, token_ids
        self._overlong_drawn += 1
        if row in self._cut_rows:
            return self._cut_rows[row]
        if self._overlong in ("drop", "error"):
            kind = OverlongError if self._overlong == "drop" else DataError
            raise kind(
                f"{self.where(row)}: the prompt has {len(token_ids)} tokens, the limit is {self._max_tokens}. "
                "Raise data.max_prompt_tokens, remove the row, or set data.overlong"
            )
        kept = self._cut(row, columns, token_ids, self._max_tokens)
        if kept is None:
            raise OverlongError(
                f"{self.where(row)}: the prompt has {len(token_ids)} tokens, the limit is {self._max_tokens}, and "
                f"data.overlong={self._overlong} cuts nothing but the user's text, which {CANNOT_BE_CUT}. Raise "
                "data.max_prompt_tokens, or remove the row"
            )
        if len(self._cut_rows) >= CACHED_ROWS:
            del self._cut_rows[next(iter(self._cut_rows))]
        self._cut_rows[row] = self._tokenizer.decode(kept.tolist()), kept
        return self._cut_rows[row]

    def _cut(self, row: int, columns: Row, token_ids: NDArray[np.int32], limit: int) -> NDArray[np.int32] | None:
        """Token ids that fit; None if the row cannot be cut."""
        side, prompt = self._overlong, columns["prompt"]
        if isinstance(prompt, str):
            begins, special = len(added_tokens(self._tokenizer)[0]), self._tokenizer.special_ids
            kept = cut_text(token_ids.tolist(), limit, side, begins=begins, special=special)
            return None if kept is None else np.asarray(kept, np.int32)

        def rendered(messages: Sequence[Message]) -> NDArray[np.int32]:
            return render(self._tokenizer, {**columns, "prompt": messages}, self.where(row), self._vocabulary)[1]

        cut = cut_messages(prompt, lambda messages: len(rendered(messages)), limit, side)
        return None if cut is None else rendered(cut)


def render(
    tokenizer: PromptRenderer, columns: Row, where: str, vocabulary: int | None = None
) -> tuple[str, NDArray[np.int32]]:
    """Return the text and token ids [P] of a row's prompt: messages are rendered, with the row's `tools`; text is
    encoded by the tokenizer alone. The text is that of the ids, which the policy reads, with special tokens.

    Args:
        vocabulary: exclusive upper bound of the token ids; None if the model is not in a local folder.

    Raises:
        DataError: the messages cannot be rendered; or the prompt has no tokens, or one that the model does not know.
    """
    prompt = columns["prompt"]
    if isinstance(prompt, str):
        ids = ids_to_go_on_from(tokenizer, prompt)
    else:
        try:
            ids = tokenizer.render(prompt, tools_of(columns, where))
        except ChatError as error:
            raise DataError(f"{where}: `prompt` is a list of messages, and {error}") from error
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens. Remove the row")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise DataError(
            f"{where}: the rendered prompt has token id {max(ids)}, but the model has {vocabulary} tokens: a token was "
            "added to the tokenizer only. Resize the model's embeddings too"
        )
    return tokenizer.decode(ids), np.asarray(ids, dtype=np.int32)
