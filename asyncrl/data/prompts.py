"""The endless stream of prompts: a pure function of (file, seed, index), hence resumable with no state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.jsonl import JsonlFile
from asyncrl.errors import DataError
from asyncrl.types import Prompt

CACHED_ROWS = 16_384
"""Tokenized rows kept in memory; the tokenizer would otherwise run once per group, on the loop's core."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer the stream needs."""

    chat_template: Any

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = True, add_generation_prompt: bool = False
    ) -> Any: ...


class PromptSource:
    """`source[index]` is the prompt at that place of the stream; epoch = index // rows of the file.

    Each epoch visits every row once, in an order seeded by (seed, epoch), or in file order without `shuffle`.
    """

    def __init__(
        self, path: str | Path, tokenizer: Tokenizer, *, seed: int, shuffle: bool, max_prompt_tokens: int
    ) -> None:
        self.file = JsonlFile(path)
        self._tokenizer = tokenizer
        self._seed = seed
        self._shuffle = shuffle
        self._max_tokens = max_prompt_tokens
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._tokenized: dict[int, tuple[str, NDArray[np.int32]]] = {}

    @property
    def rows(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> Prompt:
        """Raises DataError naming the row: unusable, longer than `max_prompt_tokens`, or chat without a template."""
        epoch, place = divmod(index, len(self.file))
        row = int(self._order(epoch)[place]) if self._shuffle else place
        columns = self.file[row]
        text, token_ids = self._tokenize(row, columns["prompt"])
        return Prompt(index=index, epoch=epoch, row=row, token_ids=token_ids, text=text, columns=columns)

    def close(self) -> None:
        self.file.close()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) > 1:  # groups in flight straddle two epochs, never more
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_order(len(self.file), self._seed, epoch)
        return self._orders[epoch]

    def _tokenize(self, row: int, prompt: str | list[dict[str, Any]]) -> tuple[str, NDArray[np.int32]]:
        known = self._tokenized.get(row)
        if known is None:
            known = render(self._tokenizer, prompt, self.file.where(row))
            if len(known[1]) > self._max_tokens:
                raise DataError(
                    f"{self.file.where(row)}: the prompt has {len(known[1])} tokens, the limit is {self._max_tokens}. "
                    "Raise data.max_prompt_tokens or remove the row"
                )
            if len(self._tokenized) >= CACHED_ROWS:
                del self._tokenized[next(iter(self._tokenized))]
            self._tokenized[row] = known
        return known


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of `range(rows)` for this epoch.

    Built on the generator's raw stream, which numpy promises never to change: `Generator.permutation` may change
    with the numpy version, and a run resumed after an upgrade would then repeat some rows and skip others.
    """
    keys = np.random.Philox(key=[seed % 2**64, epoch]).random_raw(rows)
    return np.argsort(keys, kind="stable")


def render(tokenizer: Tokenizer, prompt: str | Sequence[dict[str, Any]], where: str) -> tuple[str, NDArray[np.int32]]:
    """Text and token ids [P] of a prompt: chat template for messages, the plain tokenizer for text.

    Raises:
        DataError: messages, but the tokenizer has no chat template; or no token came out.
    """
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer.encode(prompt)
    elif not tokenizer.chat_template:
        raise DataError(
            f"{where}: `prompt` is a list of messages but the tokenizer has no chat template. "
            "Use an instruction-tuned model, or write the prompt as text"
        )
    else:
        text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        # The template wrote the special tokens already; adding them again would double the BOS.
        ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise DataError(f"{where}: the prompt has no tokens. Remove the row")
    return text, np.asarray(ids, dtype=np.int32)
