"""Derives from a chat template how an assistant's turn ends: often not with the tokenizer's EOS, as in every base model
that was given a ChatML-like template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.chat.base import Message, ToolSpec

REPLY, NEXT = "What_The_Policy_Sampled", "What_Comes_Next"
"""Placeholders for a sampled turn, and for the user's message after it."""
SHORTEST_TEXT = 3
"""Characters of a marker of several tokens, at least: a template may put quotation marks around a turn."""
USER: Message = {"role": "user", "content": "?"}
TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class Templated(Protocol):
    """A tokenizer with a chat template, of transformers or `data.local_tokenizer`."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """Example: Llama 3's template ends a turn with `token_ids=(128009,)`, `<|eot_id|>`; the EOS of the base model is
    128001."""

    token_ids: tuple[int, ...] = ()
    """Tokens that end a turn: of an answer, and of a tool call if that ends otherwise."""
    text: str = ""
    """A marker that is not one token of this tokenizer; empty if there is none."""


def turn_end(tokenizer: Templated, markers: Mapping[str, int], options: Mapping[str, Any]) -> TurnEnd:
    """Return how the template ends a turn; nothing if it writes no marker, or cannot be rendered.

    Args:
        markers: the added tokens of the tokenizer with their ids.
        options: of the chat template.
    """
    closing = _after(_rendered(tokenizer, [USER, _reply()], options), REPLY)
    following = _after(_rendered(tokenizer, [USER, _reply(), {**USER, "content": NEXT}], options), REPLY)
    marker = first_marker(closing, markers)
    by_header = marker is None and not closing.strip()
    if by_header:
        # The last turn is left open, or turns end with the header of the next one (GLM): both end a turn.
        marker = first_marker(following.partition(NEXT)[0], markers)
    if marker is not None:
        called = _call_end(tokenizer, markers, options) or (
            _result_header(tokenizer, markers, options) if by_header else []
        )
        return TurnEnd(token_ids=tuple(dict.fromkeys(markers[each] for each in (marker, *called))))
    text = closing
    for each in markers:
        text = text.partition(each)[0]
    return TurnEnd(text=text.strip() if len(text.strip()) >= SHORTEST_TEXT else "")


def described(token_ids: Sequence[int], texts: Sequence[str], decode: Callable[[list[int]], str]) -> str:
    """The line of a start about what ends a turn; empty if nothing does."""
    named = [*(f"{decode([token])!r} ({token})" for token in token_ids), *(f"the text {text!r}" for text in texts)]
    return f"a turn ends with {' or '.join(named)}" if named else ""


def without_stop_text(text: str, end_texts: Sequence[str]) -> str:
    """The text of a turn without one of `end_texts` at its end."""
    bare = text.rstrip()
    ends = next((each for each in end_texts if bare.endswith(each)), "")
    return bare.removesuffix(ends) if ends else text


def first_marker(text: str, markers: Mapping[str, int]) -> str | None:
    """The marker that `text` begins with, after white space: the longest of several."""
    begins = [each for each in markers if each and text.lstrip().startswith(each)]
    return max(begins, key=len, default=None)


def _call_end(tokenizer: Templated, markers: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
    """The marker behind a turn with tool calls; none if the template writes no calls, or closes each of them with it
    (then two calls have two; some templates refuse two)."""
    one, two = (_rendered(tokenizer, [USER, _calls(count)], {**options, "tools": [TOOL]}) for count in (1, 2))
    if one == _rendered(tokenizer, [USER, _calls(0)], {**options, "tools": [TOOL]}):
        return []
    last = max((each for each in markers if each and one.rstrip().endswith(each)), key=len, default=None)
    return [] if last is None or (two and one.count(last) != two.count(last)) else [last]


def _result_header(tokenizer: Templated, markers: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
    """The marker in front of what a tool answered, where the next header ends a turn."""
    options = {**options, "tools": [TOOL]}
    result = {"role": "tool", "name": "look_up", "content": NEXT, "tool_call_id": "call00000"}
    called = _rendered(tokenizer, [USER, _calls(1)], options)
    answered = _rendered(tokenizer, [USER, _calls(1), result], options)
    found = first_marker(answered.removeprefix(called), markers) if called and answered.startswith(called) else None
    return [] if found is None else [found]


def _reply() -> Message:
    return {"role": "assistant", "content": REPLY}


def _calls(count: int) -> Message:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "x"}}}
    calls = [{**call, "id": f"call0000{number}"} for number in range(count)]
    return {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}


def _rendered(tokenizer: Templated, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The conversation as the template writes it; empty if it cannot."""
    given = {"tokenize": False, "add_generation_prompt": False, **options}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **given))
    except Exception:  # a template is code that came with the model, and need not have these roles or any calls
        return ""


def _after(text: str, placeholder: str) -> str:
    return text.partition(placeholder)[2] if text.count(placeholder) == 1 else ""
