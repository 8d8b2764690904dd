"""The forms of supervised rows: a conversation, with the turns to train on, or a prompt and a completion in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.base import Message, ToolSpec
from asyncrl.checks.sources import Source, sources
from asyncrl.data.rows.base import Row
from asyncrl.data.rows.messages import (
    MEDIA,
    OPTIONS,
    TOOLS,
    from_json_text,
    messages_of,
    refuse_halves,
    refuse_media,
    refuse_options,
    tools_of,
)
from asyncrl.data.rows.opening import open_rows
from asyncrl.data.rows.view import SourceRows, dug
from asyncrl.errors import DataError
from asyncrl.sft.settings import SftConfig, SftDataConfig

COMPLETIONS = ("completion", "response")
"""Columns with the completion, as named by TRL and verl."""
ASSISTANT = "assistant"
SHAREGPT, SYSTEM = "conversations", "system"
"""Columns of ShareGPT's rows: messages with `from` and `value`, sometimes with a separate system message."""
ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, ASSISTANT: ASSISTANT, SYSTEM: SYSTEM}
"""Possible values of `from` in ShareGPT's rows, and the roles that they mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    """For each message, whether it is trained on; true for at least one."""
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    prompt: str
    completion: str


def train_sources(given: SftConfig) -> tuple[Source, ...]:
    """Raises ConfigError if an entry cannot be understood."""
    return sources(given.data)


def eval_source(given: SftConfig) -> Source | None:
    """None if nothing is evaluated. Filters and orders apply to the training rows only. Raises ConfigError."""
    if not given.eval.path:
        return None
    return sources(replace(given.data, path=given.eval.path, mixture={}, where={}, order_by=""), "eval.path")[0]


class SftRows(SourceRows):
    """The rows of one source, all of which have the form of the first.

    Raises:
        DataError: the form of the first row is unknown, or no row passes `where`.
    """

    def __init__(self, source: Source, data: SftDataConfig) -> None:
        super().__init__(source, open_rows(source))
        self._data = data
        first = self[0]
        columns = [] if data.completion_column else [data.messages_column]
        if columns and dug(first, source.prompt_column.split(".")) is None:
            columns.append(SHAREGPT)
        self._talks_in = next((name for name in columns if first.get(name) is not None), "")
        self.form(0)

    @property
    def text_column(self) -> str:
        """The column with most of the text of a row."""
        data = self._data
        if self._talks_in:
            return self._talks_in
        return (data.completion_column or next((name for name in COMPLETIONS if name in self[0]), "")).partition(".")[0]

    def form(self, row: int) -> Conversation | Texts:
        """Raises DataError naming the row and what is wrong with it."""
        return self._form(self[row], row)

    def text_sizes(self) -> NDArray[np.int64]:
        """Approximate length of the text of each row, [rows]."""
        return self.sizes(self.text_column)

    def check(self) -> None:
        """Check every row. Raises DataError naming the first bad one."""
        data = self._data
        wanted = {data.messages_column, self.source.prompt_column, data.completion_column, TOOLS, *COMPLETIONS}
        wanted |= {SHAREGPT, SYSTEM} if self._talks_in == SHAREGPT else set()
        wanted |= {*MEDIA, OPTIONS}
        for row, columns in enumerate(self.scan(sorted({name.partition(".")[0] for name in wanted if name}))):
            refuse_media(columns, self.where(row))
            if isinstance(self._form(columns, row), Conversation):
                refuse_options(columns, self.where(row))

    def _form(self, columns: Row, row: int) -> Conversation | Texts:
        tools = tools_of(columns, self.where(row))
        if name := self._talks_in:
            if columns.get(name) is None:
                raise DataError(
                    f"{self.where(row)} has no column `{name}`, but {self.where(0)} has one. Write all rows of "
                    f"{self.source.title} in one form"
                )
            messages = _messages(columns[name], name, self.where(row))
            if name == SHAREGPT and columns.get(SYSTEM) and messages[0]["role"] != SYSTEM:
                messages = [*_messages(_as_messages(columns[SYSTEM], SYSTEM), SYSTEM, self.where(row)), *messages]
            return self._conversation(messages, 0, tools, row)
        return self._answered(columns, tools, row)

    def _answered(self, columns: Row, tools: tuple[ToolSpec, ...], row: int) -> Conversation | Texts:
        """The form of a row with a prompt and a completion."""
        data, where = self._data, self.where(row)
        prompt = dug(columns, self.source.prompt_column.split("."))
        names = (data.completion_column,) if data.completion_column else COMPLETIONS
        name = next((each for each in names if dug(columns, each.split(".")) is not None), "")
        if prompt is None or not name:
            raise self._columns_missing(columns, row, prompt is None)
        completion = dug(columns, name.split("."))
        prompt, completion = from_json_text(prompt), from_json_text(completion)
        if isinstance(prompt, str) and isinstance(completion, str) and not data.chat:
            for column, text in ((self.source.prompt_column, prompt), (name, completion)):
                refuse_halves(text, column, where)
                if not text or (column == name and not text.strip()):
                    raise DataError(f"{where}: `{column}` is empty. Remove the row")
            return Texts(prompt=prompt, completion=completion)
        before = _messages(_as_messages(prompt, "user"), self.source.prompt_column, where)
        after = _messages(_as_messages(completion, ASSISTANT), name, where)
        return self._conversation([*before, *after], len(before), tools, row)

    def _conversation(
        self, messages: Sequence[Message], first: int, tools: tuple[ToolSpec, ...], row: int
    ) -> Conversation:
        """Choose the messages that are trained on.

        Args:
            first: number of the first message that may be trained on.
        """
        turns = [
            number
            for number, message in enumerate(messages)
            if number >= first and message["role"] == ASSISTANT and message.get("weight") != 0
        ]
        if not turns:
            raise DataError(
                f"{self.where(row)}: no message is an assistant's (roles: "
                f"{', '.join(str(message['role']) for message in messages)}), so no token would carry loss. Remove the "
                "row, or name the column of the answers: data.completion_column=COLUMN"
            )
        learned = {turns[-1]} if self._data.learn == "last" else set(turns)
        for number in learned:
            parts = [messages[number].get(part) for part in ("content", "tool_calls", "reasoning_content")]
            if not any(part.strip() if isinstance(part, str) else part for part in parts):
                raise DataError(
                    f"{self.where(row)}: message {number}, an assistant's, is empty: the model would learn to say "
                    "nothing. Remove the row, or give the message `weight: 0`"
                )
        return Conversation(
            messages=tuple({key: part for key, part in each.items() if key != "weight"} for each in messages),
            learned=tuple(number in learned for number in range(len(messages))),
            tools=tools,
        )

    def _columns_missing(self, columns: Row, row: int, no_prompt: bool) -> DataError:
        data = self._data
        known = ", ".join(sorted(columns if len(columns) > 1 else self[row])) or "none"
        if no_prompt:
            return DataError(
                f"{self.where(row)} has neither a column `{data.messages_column}` nor `{self.source.prompt_column}` "
                f"(columns: {known}). Name them: data.messages_column=COLUMN for conversations, else "
                "data.prompt_column=COLUMN data.completion_column=COLUMN"
            )
        looked_for = data.completion_column or "` or `".join(COMPLETIONS)
        return DataError(
            f"{self.where(row)} has no column `{looked_for}` (columns: {known}). Name the column that the model should "
            "learn to write: data.completion_column=COLUMN"
        )


def _as_messages(given: Any, role: str) -> Any:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _messages(given: Any, column: str, where: str) -> list[Message]:
    """As `messages_of`, but also accepts ShareGPT's form."""
    given = from_json_text(given)
    if isinstance(given, list):
        given = [_of_sharegpt(each, where) if isinstance(each, Mapping) else each for each in given]
    found = messages_of(given, column, where)
    for message in found:
        if (weight := message.get("weight", 1)) not in (0, 1):
            raise DataError(f"{where}: the `weight` of a message must be 0 (not learned) or 1, got {weight!r:.80}")
    return found


def _of_sharegpt(message: Mapping[str, Any], where: str) -> Message:
    """Convert `from` and `value` to `role` and `content`, if present. ShareGPT has no one form of tool calls."""
    if message.get("from") is None or message.get("role") is not None:
        return dict(message)
    role = ROLES.get(str(message["from"]))
    if role is None or message.get("value") is None:
        raise DataError(
            f"{where}: a message of ShareGPT's form needs `value` and a `from` of {', '.join(ROLES)}; got "
            f"{dict(message)!r:.80}. Give other messages `role` and `content`, and tool calls `tool_calls`"
        )
    rest = {key: part for key, part in message.items() if key not in ("from", "value")}
    return {**rest, "role": role, "content": message["value"]}
