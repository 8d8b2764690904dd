"""A byte-level tokenizer for tiny models: ids 0-255 are the bytes, followed by pad, bos, eos and reserved ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 264
"""Padded to a multiple of 8 with reserved ids, so that the tokenizer knows every id that a model can sample."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(phrases: Sequence[str] = ()) -> Tokenizer:
    """Return the `tokenizers` object. Decoding valid UTF-8 gives back the text; invalid bytes become U+FFFD.

    Args:
        phrases: texts that become one token each, with ids from VOCAB_SIZE up.
    """
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _special_names()])
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return tokenizer


def save_byte_tokenizer(directory: str | Path, phrases: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> None:
    """Write the files from which `AutoTokenizer.from_pretrained(directory)` loads it."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(phrases).save(str(target / "tokenizer.json"))
    pad, bos, eos = _special_names()[:3]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
        "chat_template": template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _special_names() -> list[str]:
    """Names of ids 256 and up, in order."""
    return ["<|pad|>", "<|bos|>", "<|eos|>"] + [f"<|reserved_{i}|>" for i in range(EOS_ID + 1, VOCAB_SIZE)]


def _byte_symbols() -> list[str]:
    """The printable character for each byte in GPT-2's byte-level alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in symbols)
    symbols.update({byte: chr(0x100 + place) for place, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]
