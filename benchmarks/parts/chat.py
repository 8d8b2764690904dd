"""A chat tokenizer like those of models, trained on the spot: byte-level BPE with Qwen's markers, and its renderer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.chat.renderer import RendererChat

END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TEXTS = Path(__file__).resolve().parents[2] / "docs"
VOCABULARY = 8192


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on the pages of the documentation. A token is about four letters of them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train([str(page) for page in sorted(TEXTS.glob("*.md"))], trainer)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=SPECIAL[0], clean_up_tokenization_spaces=False
    )


@cache
def chat() -> RendererChat:
    return RendererChat(tokenizer(), "qwen3", {}, chosen=True)
