"""Text behind other text. Tokenizers of sentencepiece (Llama 2, Mistral, T5) begin what they are given with a space,
and decode without it: both are right where a text begins, and wrong behind other tokens, as in a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LETTER = "a"
BEFORE = ("\n", ">", ".")
"""What a text is encoded behind where nothing else is known: the first that stays as it is."""
NEAR = 64
"""Characters before a text that its tokens may hang on."""


class Seam:
    """`encode` and `decode` of what stands behind other tokens; of a tokenizer that adds no space they are its own.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._letter = self._ids(LETTER)
        # Others (of whole words, of word pieces) write spaces between tokens, which are in none of them.
        held = tokenizer.convert_ids_to_tokens(self._letter[:1])
        apart = str(tokenizer.decode(2 * self._letter)).split() == [LETTER, LETTER]
        self._spaced = apart and not str(held[0]).startswith(LETTER)

    def encode(self, text: str, behind: str = "") -> list[int]:
        """Special tokens that are written out become what they name.

        Args:
            behind: what stands before it, where that is known.
        """
        for before in (*([behind[-NEAR:]] if behind else ()), *BEFORE) if self._spaced and text else ():
            head, whole = self._ids(before), self._ids(before + text)
            if head and self._tokenizer.unk_token_id not in head and whole[: len(head)] == head:
                return whole[len(head) :]
        return self._ids(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Special tokens are written out if `special`, else left out."""
        if self._spaced:
            text = str(self._tokenizer.decode([*self._letter, *ids], skip_special_tokens=not special))
            if text.startswith(LETTER):
                return text[len(LETTER) :]
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
