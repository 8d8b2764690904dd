"""A caching tokenizer for renderers, which encode the same few markers and headers at every turn, some four times each.

Measured with `python -m benchmarks.episodes`: these encodings, and what transformers does around the actual tokenizer
for new texts, are most of what a turn costs a worker.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

SHORT = 64
"""Limit on the characters of a text whose ids are cached: markers and headers are shorter, most other texts longer."""
KEPT = 1024
"""Number of texts that are cached."""
FAST = "transformers.tokenization_utils_tokenizers"
"""Module of the `_encode_plus` that, for a single text, only calls the underlying tokenizer."""
WITH_PLACES = {"add_special_tokens": False, "return_offsets_mapping": True}
"""The arguments with which renderers encode the text of a message."""


class Remembering:
    """Behaves like `tokenizer` otherwise. It must not be changed any more, because cached ids are kept for good.

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
        """Cached because it is read for each marker of each turn, and the tokenizer looks for it in several places."""

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
        # Single characters: renderers encode one at every turn to check that this tokenizer gives offsets.
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
    """The underlying tokenizer, if it encodes a single text exactly as transformers does; else None."""
    if getattr(getattr(type(tokenizer), "_encode_plus", None), "__module__", "") != FAST:
        return None
    backend = tokenizer.backend_tokenizer
    return backend if backend.encode_special_tokens == tokenizer.split_special_tokens else None
