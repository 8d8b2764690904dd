"""Messages as rows hold them: checked, and in the form that chat templates are written for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import DataError


def messages_of(given: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Copies, without the fields that a parquet file fills up with nothing, and the texts of a message's parts as one.

    Args:
        where: the row, for errors.

    Raises:
        DataError: naming the row, and the message that is none.
    """
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: `{column}` must be text or a non-empty list of messages, got {given!r:.80}")
    refuse_halves(given, column, where)
    return [_message(each, where) for each in given]


def refuse_halves(value: object, column: str, where: str) -> None:
    """Raises DataError where a text in it, however deep, has half a character (a lone surrogate, as JSON may write one
    and tokenizers take none)."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: `{column}` has half a character, {value[error.start]!a}, as a text that was cut within an "
                "emoji. Write it whole, or remove the row"
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
    """A template writes of anything else its Python form, or nothing at all, and the model would read that."""
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
