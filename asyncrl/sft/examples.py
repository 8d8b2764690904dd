"""Rows as token ids with a loss mask: rendered, cut if too long, and cached for the next epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import ChatError, Message, added_tokens, ids_to_go_on_from
from asyncrl.chat.choice import open_chat
from asyncrl.chat.renderer import RendererChat
from asyncrl.chat.supervised import Supervised
from asyncrl.data.prompts import CANNOT_BE_CUT
from asyncrl.data.truncation import cut_messages, cut_text
from asyncrl.errors import DataError, OverlongError
from asyncrl.rollout.worker.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from asyncrl.sft.rows import Conversation, SftRows, Texts
from asyncrl.sft.settings import SftConfig, SftDataConfig

KEPT_TOKENS = 1 << 26
"""Limit on the cached tokens of rendered rows, 5 bytes each; without the cache every epoch would tokenize again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, ready for training."""

    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T] Always false for the first token, which nothing precedes; true for at least one token."""
    rendered: int
    """Number of tokens before cutting."""
    as_asked: bool = True
    """See `Supervised`."""

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


class Encoder:
    """Converts the form of a row to tokens, with the model's tokenizer and renderer."""

    def __init__(self, tokenizer: Any, chat: RendererChat, data: SftDataConfig, vocabulary: int) -> None:
        self.tokenizer, self.chat, self._data, self._vocabulary = tokenizer, chat, data, vocabulary

    def example(self, form: Conversation | Texts, where: str) -> Example:
        """Encode a row and apply `data.max_tokens`.

        Args:
            where: the row, for errors.

        Raises:
            DataError, OverlongError: as `whole` and `fitted`.
        """
        return self.fitted(self.whole(form, where), form, where)

    def whole(self, form: Conversation | Texts, where: str) -> Example:
        """Encode a row of any length.

        Raises:
            DataError: it cannot be rendered, or none of its tokens has a loss.
        """
        try:
            return self._example(self._rendered(form), where)
        except ChatError as error:
            raise DataError(f"{where}: {error}") from error

    def _example(self, found: Supervised, where: str) -> Example:
        mask = np.asarray(found.loss_mask, np.bool_)
        mask[:1] = False
        if max(found.token_ids, default=0) >= self._vocabulary:
            raise DataError(
                f"{where}: the rendered row has token id {max(found.token_ids)}, but the model has {self._vocabulary} "
                "tokens: a token was added to the tokenizer only. Resize the model's embeddings too"
            )
        if not mask.any():
            raise DataError(
                f"{where}: no token of the rendered row carries loss. Remove the row, or look at it with --dry-run"
            )
        ids = np.asarray(found.token_ids, np.int32)
        return Example(token_ids=ids, loss_mask=mask, rendered=len(ids), as_asked=found.as_asked)

    def fitted(self, whole: Example, form: Conversation | Texts, where: str) -> Example:
        """Apply `data.overlong` if the row, which is `whole`, has more than `data.max_tokens` tokens.

        Raises:
            OverlongError: the row is to be dropped. DataError: its length is an error.
        """
        limit, rule = self._data.max_tokens, self._data.overlong
        if whole.rendered <= limit:
            return whole
        said = f"{where}: the row has {whole.rendered} tokens, data.max_tokens allows {limit}"
        if rule == "error":
            raise DataError(f"{said}. Raise data.max_tokens, remove the row, or set data.overlong")
        if rule == "drop":
            raise OverlongError(said)
        cut = (
            self._cut_prompt(form, limit, rule) if isinstance(form, Texts) else self._cut_talk(form, limit, rule, where)
        )
        if cut is None:
            raise OverlongError(f"{said}, and data.overlong={rule} cuts the user's text alone, which {CANNOT_BE_CUT}")
        return replace(self._example(cut, where), rendered=whole.rendered)

    def _cut_talk(self, form: Conversation, limit: int, side: str, where: str) -> Supervised | None:
        def rendered(messages: Sequence[Message]) -> Supervised:
            try:
                return self._rendered(replace(form, messages=tuple(messages)))
            except ChatError as error:
                raise DataError(f"{where}: {error}") from error

        cut = cut_messages(form.messages, lambda messages: len(rendered(messages).token_ids), limit, side)
        return None if cut is None else rendered(cut)

    def _cut_prompt(self, form: Texts, limit: int, side: str) -> Supervised | None:
        found = self._rendered(form)
        prompt, answer = found.token_ids[: found.loss_mask.index(True)], found.token_ids[found.loss_mask.index(True) :]
        begins, special = len(added_tokens(self.chat)[0]), self.chat.special_ids
        kept = cut_text(prompt, limit - len(answer), side, begins=begins, special=special)
        return None if kept is None else _answered(kept, answer)

    def decode(self, token_ids: Sequence[int], *, begins: bool = True) -> str:
        """`begins`: whether no tokens precede these."""
        return self.chat.decode(list(token_ids)) if begins else self.chat.seam.decode(token_ids, special=True)

    def _rendered(self, form: Conversation | Texts) -> Supervised:
        if isinstance(form, Conversation):
            return self.chat.supervise(form.messages, form.tools, learned=form.learned)
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ChatError("the tokenizer has no EOS, so nothing would teach the model to stop. Give it an eos_token")
        # Encoded separately, as in a rollout: the completion is sampled after the prompt's own ids.
        before = ids_to_go_on_from(self.chat, form.prompt)
        after = self._with_one_end(form, int(end))
        return _answered(before, after)

    def _with_one_end(self, form: Texts, eos: int) -> list[int]:
        """Token ids of the completion and its end: the EOS, unless the text ends with it or with another stop token."""
        ends = {eos, *self.chat.stop_token_ids}
        bare = form.completion.rstrip()
        written = any(bare.endswith(self.chat.decode([end])) for end in ends)
        ids = self.chat.seam.encode(bare if written else form.completion, behind=form.prompt)
        while len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in ends:
            ids.pop()
        return ids if ids and ids[-1] in ends else [*ids, eos]


def _answered(prompt: Sequence[int], answer: Sequence[int]) -> Supervised:
    return Supervised(token_ids=(*prompt, *answer), loss_mask=(*([False] * len(prompt)), *([True] * len(answer))))


def open_encoder(given: SftConfig) -> Encoder:
    """Raises ConfigError if the model's folder has no suitable tokenizer, or the renderer does not fit it."""
    tokenizer = load_tokenizer(given.model.path)
    vocabulary = check_vocabulary(given.model.path, tokenizer)
    chat = open_chat(tokenizer, given.model.path, given.model.renderer, given.model.chat)
    chat.stop_token_ids = stop_token_ids(given.model.path, tokenizer, chat.stop_token_ids)
    return Encoder(tokenizer, chat, given.data, vocabulary)


class Examples:
    """The examples of some rows, by row number; rendered once and cached."""

    def __init__(self, rows: Sequence[SftRows], encoder: Encoder, kept_tokens: int = KEPT_TOKENS) -> None:
        self._parts, self._encoder, self._left = rows, encoder, kept_tokens
        self._known: dict[tuple[int, int], Example] = {}

    def example(self, part: int, row: int) -> Example:
        """The example for row `row` of source `part`. Raises DataError and OverlongError as `Encoder.example`."""
        known = self._known.get((part, row))
        if known is None:
            rows = self._parts[part]
            known = self._encoder.example(rows.form(row), rows.where(row))
            if len(known.token_ids) <= self._left:  # once full, the others are rendered each time
                self._left -= len(known.token_ids)
                self._known[part, row] = known
        return known
