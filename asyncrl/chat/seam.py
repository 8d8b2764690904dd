"""Encodes and decodes text that follows other text. Sentencepiece tokenizers (Llama 2, Mistral, T5) put a space before
the text they encode, and remove it when they decode: right at the beginning of a text, wrong after other tokens, as in
a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LETTER = "a"
BEFORE = ("\n", ">", ".")
"""Texts to encode after if the preceding text is unknown; the first one whose tokens stay unchanged is used."""
NEAR = 64
"""Number of preceding characters that can affect the tokens of a text."""


class Seam:
    """`encode` and `decode` for text that follows other tokens. If the tokenizer adds no space they are its own.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._letter = self._ids(LETTER)
        # Other tokenizers (whole words, word pieces) write spaces between tokens that are part of no token.
        held = tokenizer.convert_ids_to_tokens(self._letter[:1])
        apart = str(tokenizer.decode(2 * self._letter)).split() == [LETTER, LETTER]
        self._spaced = apart and not str(held[0]).startswith(LETTER)

    def encode(self, text: str, behind: str = "") -> list[int]:
        """Encode. Special tokens that are written out become their ids.

        Args:
            behind: the preceding text, if known.
        """
        for before in (*([behind[-NEAR:]] if behind else ()), *BEFORE) if self._spaced and text else ():
            head, whole = self._ids(before), self._ids(before + text)
            if head and self._tokenizer.unk_token_id not in head and whole[: len(head)] == head:
                return whole[len(head) :]
        return self._ids(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode. Special tokens are written out if `special`, else left out."""
        if self._spaced:
            text = str(self._tokenizer.decode([*self._letter, *ids], skip_special_tokens=not special))
            if text.startswith(LETTER):
                return text[len(LETTER) :]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
