"""Checks the messages of rows and brings them into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.chat.base import ToolSpec
from asyncrl.errors import DataError

TOOLS = "tools"
"""Column of the tools that the prompt describes to the policy, as in TRL's datasets."""


def messages_of(given: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Copy the messages, without null fields (parquet files fill them in), and with the text parts of a message joined.

    Args:
        where: the row, for errors.

    Raises:
        DataError: naming the row and the invalid message.
    """
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: `{column}` must be text or a non-empty list of messages, got {given!r:.80}")
    refuse_halves(given, column, where)
    return [_message(each, where) for each in given]


def tools_of(row: Mapping[str, Any], where: str) -> tuple[ToolSpec, ...]:
    """The tools in the row's column `tools`, a list or JSON text, without fields that are null (parquet files fill in
    missing fields). Raises DataError naming the row."""
    given = row.get(TOOLS)
    if not given:
        return ()
    try:
        found = json.loads(given) if isinstance(given, str) else _without_nothing(given)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: `{TOOLS}` is text, but not valid JSON ({error}). {_OWN_TOOLS}") from error
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        said = f"{where}: `{TOOLS}` must be a list of tools, as in OpenAI's API; got {found!r:.80}"
        raise DataError(f"{said}. {_OWN_TOOLS}")
    refuse_halves(found, TOOLS, where)
    return tuple(dict(tool) for tool in found)


_OWN_TOOLS = (
    "The policy is shown the tools in this column: give a list of tools, or rename the column if it holds something "
    "else"
)


def _without_nothing(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {key: _without_nothing(part) for key, part in given.items() if part is not None}
    return [_without_nothing(part) for part in given] if isinstance(given, list) else given


def refuse_halves(value: object, column: str, where: str) -> None:
    """Raises DataError if a text in `value`, at any depth, has a lone surrogate: JSON allows one, tokenizers do not."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: `{column}` contains half a character, {value[error.start]!a}: the text was probably cut in "
                "the middle of an emoji. Write the whole character, or remove the row"
            ) from error
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            refuse_halves(each, column, where)


def _message(given: Any, where: str) -> dict[str, Any]:
    plain = {key: part for key, part in given.items() if part is not None} if isinstance(given, Mapping) else {}
    if not isinstance(plain.get("role"), str) or not ("content" in plain or plain.get("tool_calls")):
        raise DataError(f"{where}: a message needs `role` and `content`, got {given!r:.80}")
    calls = plain.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{where}: `tool_calls` must be a list of calls, as in OpenAI's API; got {calls!r:.80}")
    return {**plain, "content": _text(plain.get("content", ""), where)}


def _text(content: Any, where: str) -> str:
    """Accepts only text: a template would write anything else in its Python form, or not at all."""
    if isinstance(content, str):
        return content
    texts = [_text_of(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        raise DataError(
            f"{where}: the `content` of a message must be text, or parts of type text, got {content!r:.80}. Write it "
            "as text; images are not supported"
        )
    return "".join(text for text in texts if text is not None)


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        return None
    return part["text"]
