"""Shortens what is too long by the user's text alone: without its BOS, system message, role headers or generation
prompt a prompt is none that the model was trained to read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from asyncrl.chat.base import Message

LEFT, RIGHT = "truncate_left", "truncate_right"
USER = "user"


def cut_messages(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int, side: str
) -> list[Message] | None:
    """Return the messages with as much of the user's text as fits; None if not one character of it does.

    Args:
        count: the number of tokens of a conversation as rendered.
        limit: of tokens.
        side: LEFT cuts the beginning, from the first message of the user on; RIGHT the end, from the last one on.
    """
    length = sum(len(each["content"]) for each in messages if each["role"] == USER)
    if length == 0 or count(without(messages, length - 1, side)) > limit:
        return None
    fewest, most = 0, length - 1  # `most` fits
    while fewest < most:
        middle = (fewest + most) // 2
        if count(without(messages, middle, side)) <= limit:
            most = middle
        else:
            fewest = middle + 1
    return without(messages, most, side)


def without(messages: Sequence[Message], characters: int, side: str) -> list[Message]:
    """Return the messages without the first, or last, `characters` of the user's text."""
    kept = list(messages)
    places = [place for place, each in enumerate(messages) if each["role"] == USER]
    for place in places if side == LEFT else reversed(places):
        text = messages[place]["content"]
        gone = min(characters, len(text))
        characters -= gone
        kept[place] = {**messages[place], "content": text[gone:] if side == LEFT else text[: len(text) - gone]}
    return kept


def cut_text(ids: Sequence[int], limit: int, side: str, *, begins: int, special: Collection[int]) -> list[int] | None:
    """Return the token ids of a text cut to `limit`; None if no token of it would be left, or if it was rendered
    beforehand: which of it is the user's text cannot be told.

    Args:
        begins: number of tokens that the tokenizer puts before a text; they stay.
        special: ids that only a chat template writes into a text.
    """
    head, body = list(ids[:begins]), list(ids[begins:])
    room = limit - begins
    if room < 1 or not {*special}.isdisjoint(body):
        return None
    return head + (body[-room:] if side == LEFT else body[:room])
