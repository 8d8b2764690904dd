"""A tokenizer for renderers: they encode the same few markers and headers anew at every turn, some four times each.

Measured with `python -m benchmarks.episodes`: most of what a turn costs a worker is that, and what transformers does
around the tokenizer proper for the texts that are new.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SHORT = 64
"""Letters of a text whose ids are kept: markers and headers are shorter, what people write is mostly longer."""
KEPT = 1024
"""Texts."""
FAST = "transformers.tokenization_utils_tokenizers"
"""Where the `_encode_plus` is that asks the tokenizer beneath and adds nothing of its own to one text."""
WITH_PLACES = {"add_special_tokens": False, "return_offsets_mapping": True}
"""What renderers ask for with the text of a message."""


class Remembering:
    """What `tokenizer` is in all else. It must not be changed any more: ids are kept for good.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = lru_cache(KEPT)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))
        self._of_token = lru_cache(KEPT)(tokenizer.convert_tokens_to_ids)
        self._probed: dict[tuple[Any, ...], Any] = {}
        self._backend: Any = _backend_of(tokenizer)
        self.unk_token_id = tokenizer.unk_token_id
        """Looked at for each marker of each turn; the tokenizer looks for it in several places."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: Any, *args: Any, **given: Any) -> list[int]:
        if args or given != {"add_special_tokens": False} or type(text) is not str or len(text) > SHORT:
            return self._tokenizer.encode(text, *args, **given)
        return list(self._ids(text))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._of_token(tokens) if type(tokens) is str else self._tokenizer.convert_tokens_to_ids(tokens)

    def __call__(self, text: Any, *args: Any, **given: Any) -> Any:
        if type(text) is not str or args:
            return self._tokenizer(text, *args, **given)
        if len(text) > 1:
            return self._with_places(text) if given == WITH_PLACES else self._tokenizer(text, **given)
        # Of a single letter, which renderers look at at every turn to see that this tokenizer gives offsets.
        what = (text, *sorted(given.items()))
        if what not in self._probed:
            self._probed[what] = self._tokenizer(text, **given)
        return self._probed[what]

    def _with_places(self, text: str) -> Any:
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return self._tokenizer(text, **WITH_PLACES)
        made = backend.encode(text, add_special_tokens=False)
        return {"input_ids": made.ids, "offset_mapping": made.offsets}


def _backend_of(tokenizer: Any) -> Any:
    """The tokenizer beneath, where what transformers gives of one text is what that gives; else None."""
    if getattr(getattr(type(tokenizer), "_encode_plus", None), "__module__", "") != FAST:
        return None
    backend = tokenizer.backend_tokenizer
    return backend if backend.encode_special_tokens == tokenizer.split_special_tokens else None
