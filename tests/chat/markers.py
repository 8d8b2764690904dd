"""A byte tokenizer with the markers of every renderer, which a family's own tokenizer has besides its words."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from asyncrl.quickstart.byte_tokenizer import byte_tokenizer

SPECIAL, WORDS = (part.split() for part in (Path(__file__).parent / "markers.txt").read_text().split("\n\n"))
"""WORDS are markers that a tokenizer decodes as text, and one word. Sampled letter by letter, that word is a sequence
that no tokenizer gives."""


@cache
def tokenizer(eos: str = "<|eos|>", template: str = "") -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=eos,
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        chat_template=template or None,
    )


def save(folder: Path, eos: str = "<|im_end|>", template: str = "") -> None:
    tokenizer(eos, template).save_pretrained(folder)
