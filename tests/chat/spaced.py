"""Tokenizers that put a space before their input, as those of sentencepiece do: that of Llama 2, with byte fallback, as
in its file (`legacy`) or as transformers makes it today (`today`), and that of T5 and XLM-R (`unigram`)."""

from __future__ import annotations

import string
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MARK = "▁"
SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = MARK + string.ascii_letters + string.digits + "<|>[]/?.:()"
JOINED = (MARK + MARK, MARK * 4, "ab", "he", "hello", MARK + "ab", MARK + "f", MARK + "return", MARK + "4")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
KINDS = ("legacy", "today", "unigram")


@cache
def tokenizer(kind: str, ends: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one of `KINDS`.

    Args:
        ends: append the end token to every input, as T5's does.
    """
    made = Tokenizer(_unigram() if kind == "unigram" else _bpe())
    if kind == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    else:
        scheme = "first" if kind == "today" else "always"
        made.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme=scheme, split=kind == "unigram")
    metaspace = decoders.Metaspace(MARK, prepend_scheme="always")
    parts = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = metaspace if kind == "unigram" else decoders.Sequence(parts)
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    single = "<s> $A </s>" if ends else "<s> $A"
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def tokenizer_of_words(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens have no spaces; decoding writes one between two tokens."""
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def tokenizer_of_bytes(end: AddedToken) -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, with a chat template whose turns end with `end`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([end])
    template = (
        f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{end.content}\n{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end.content, chat_template=template)


def _bpe() -> models.BPE:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    merges = []
    for word in JOINED:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _unigram() -> models.Unigram:
    pieces = [(name, 0.0) for name in SPECIAL] + [(letter, -8.0) for letter in LETTERS]
    return models.Unigram(pieces + [(word, -6.0) for word in JOINED], unk_id=0, byte_fallback=False)
