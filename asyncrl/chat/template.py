"""Finds out what a chat template writes after an assistant's turn, from the template alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.chat.base import ChatError, Message, ToolSpec

SAID = "What_The_Policy_Sampled"
"""Placeholder for the sampled turn. A template that changes it cannot be extended."""


PARSERS = ("tool_parser", "reasoning_parser")
"""Options of the default renderer that are not passed to the template."""


def without_parsers(options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `model.chat` that is passed to the template."""
    return {key: value for key, value in options.items() if key not in PARSERS}


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens by id, with those that have no name of their own: Gemma's and Phi's ends of a turn are in no
    `all_special_tokens`."""
    added = {int(at): str(token) for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return added | {int(at): str(token) for at, token in named}


def markers(tokenizer: Any) -> dict[str, int]:
    """The ids of the tokens that were added to a tokenizer's vocabulary, special or not, and of its named tokens."""
    added = {str(token): int(at) for at, token in tokenizer.added_tokens_decoder.items()}
    return added | {token: at for at, token in special_tokens(tokenizer).items()}


def extension_text(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[ToolSpec], options: Mapping[str, Any]
) -> str:
    """The end of an assistant's turn, `messages`, and the beginning of the next turn, as the template writes them.

    Raises:
        ChatError: the template changes the text of the turn, or cannot be rendered.
    """
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}, *messages]
    given = {**options, "tools": list(tools) or None}
    try:
        text = str(tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True, **given))
    except Exception as error:  # a template is code that came with the model
        raise ChatError(f"the tokenizer's chat template cannot be rendered: {type(error).__name__}: {error}") from error
    if text.count(SAID) != 1:
        raise ChatError("the tokenizer's chat template changes what the assistant said")
    return text[text.index(SAID) + len(SAID) :]
