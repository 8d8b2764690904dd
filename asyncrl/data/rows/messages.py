"""Checks the messages of rows and brings them into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from asyncrl.chat.base import ToolSpec
from asyncrl.errors import DataError

TOOLS = "tools"
"""Column of the tools that the prompt describes to the policy, as in TRL's datasets."""


MADE_NULLS = frozenset({TOOLS, "tool_calls", "function_call"})
"""Columns and fields below which a null, where rows come from Arrow, is no value but a field that only other rows have.
The author of a JSONL file may mean one."""


def is_message(fields: Collection[str]) -> bool:
    """Whether an object with these fields is a message, in OpenAI's form or ShareGPT's."""
    return "role" in fields or ("from" in fields and "value" in fields)


def without_made_nulls(value: Any, below: bool = False) -> Any:
    """Leave out the null fields that Arrow has made: of messages, and below `MADE_NULLS`."""
    if isinstance(value, Mapping):
        below = below or is_message(value)
        return {
            name: without_made_nulls(part, below or name in MADE_NULLS)
            for name, part in value.items()
            if part is not None or not below
        }
    return [without_made_nulls(part, below) for part in value] if isinstance(value, list) else value


def from_json_text(given: Any) -> Any:
    """Messages that are stored as their JSON text, decoded; anything else as it is."""
    if not isinstance(given, str) or not given.lstrip().startswith("["):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return given
    is_list = isinstance(found, list) and found
    return found if is_list and all(isinstance(each, Mapping) and is_message(each) for each in found) else given


def messages_of(given: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Copy the messages, without null fields (`"tool_calls": null`, as clients of OpenAI's API write them), and with
    the text parts of a message joined. What is below them stays: a null argument of a tool call may be meant.

    Args:
        where: the row, for errors.

    Raises:
        DataError: naming the row and the invalid message.
    """
    given = from_json_text(given)
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: `{column}` must be text or a non-empty list of messages, got {given!r:.80}")
    refuse_halves(given, column, where)
    return [_message(each, where) for each in given]


def tools_of(row: Mapping[str, Any], where: str) -> tuple[ToolSpec, ...]:
    """The tools in the row's column `tools`. That list, each tool and its parameters may be JSON text, as it is stored
    where each tool has other fields. Raises DataError naming the row."""
    given = row.get(TOOLS)
    if not given:
        return ()
    try:
        found = _decoded(given)
        found = [_decoded(tool) for tool in found] if isinstance(found, list) else found
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: `{TOOLS}` is text, but not valid JSON ({error}). {_OWN_TOOLS}") from error
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        said = f"{where}: `{TOOLS}` must be a list of tools, as in OpenAI's API; got {found!r:.80}"
        raise DataError(f"{said}. {_OWN_TOOLS}")
    refuse_halves(found, TOOLS, where)
    return tuple(_with_parameters(tool, where) for tool in found)


def _decoded(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def _with_parameters(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Decode parameters that are JSON text: a template would quote them."""
    if isinstance(inner := tool.get("function"), Mapping):
        return {**tool, "function": _with_parameters(inner, where)}
    if not isinstance(given := tool.get("parameters"), str):
        return dict(tool)
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise DataError(
            f"{where}: the `parameters` of a tool in `{TOOLS}` must be an object (a JSON schema) or its JSON text, got "
            f"{given!r:.80}"
        )
    return {**tool, "parameters": found}


_OWN_TOOLS = (
    "The policy is shown the tools in this column: give a list of tools, or rename the column if it holds something "
    "else"
)


MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns in which other frameworks keep what they show to models that see or hear."""


def refuse_media(row: Mapping[str, Any], where: str) -> None:
    """Raises DataError naming the row if one of its columns `MEDIA` is not empty."""
    for name in MEDIA:
        if _has_content(row.get(name)):
            raise DataError(
                f"{where} has something in its column `{name}`, but the policy reads text only and would answer "
                "without it. Give rows of text alone, leave such rows out with data.where, or rename the column if "
                "only your reward or environment reads it"
            )


OPTIONS = "chat_template_kwargs"
"""Column of a row's own options of the chat template, as TRL and unsloth take them."""


def refuse_options(row: Mapping[str, Any], where: str) -> None:
    """Raises DataError naming the row if it has options of the chat template of its own."""
    given = row.get(OPTIONS)
    if isinstance(given, Mapping):
        given = {name: option for name, option in given.items() if option is not None}
    if given and given != "{}":
        raise DataError(
            f"{where} has {given!r:.80} in its column `{OPTIONS}`, but all rows are rendered with the options of "
            "model.chat, so the row's own would be ignored. Remove the column, and set model.chat.NAME=VALUE for all "
            "rows"
        )


def _has_content(value: Any) -> bool:
    """Whether any value in it is neither null nor empty: Arrow fills the fields of an image that a row lacks with
    nulls."""
    if isinstance(value, Mapping):
        return any(map(_has_content, value.values()))
    return any(map(_has_content, value)) if isinstance(value, list) else bool(value)


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
            "as text; images are not supported, nor are audio and video"
        )
    return "".join(text for text in texts if text is not None)


def _text_of(part: Any) -> str | None:
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        return None
    return part["text"]
