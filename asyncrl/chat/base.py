"""The chat interface: renders messages to token ids, parses sampled ids into a reply, and extends them to a next turn.

Sampled tokens are never rendered again: `extend` returns the ids that follow them, and the ids before stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError

Message = dict[str, Any]
"""A message as in OpenAI's chat API: `role`, `content`, and `tool_calls` or `tool_call_id` and `name`."""
ToolSpec = dict[str, Any]
"""A tool as in the same API: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ChatError(AsyncRLError, ValueError):
    """Messages cannot be rendered, or no turn can follow a sampled one."""


class TurnOverError(ChatError):
    """No turn can follow a sampled one, whatever the messages between them: what was sampled is the reason."""


def no_template() -> ChatError:
    """The error for messages when there is no chat template to render them with."""
    return ChatError("the tokenizer has no chat template. Use an instruction-tuned model, or write the prompt as text")


def no_place_for_tools() -> ChatError:
    """The error for tools that the chat template leaves out."""
    return ChatError(
        "the chat template has no place for `tools`, so the policy would never see them. Use a model whose template "
        "has one, or describe them in a system message and leave out `tools`"
    )


def unrenderable(what: str, error: Exception) -> ChatError:
    """The error for a list of messages that `what` failed to render with `error`."""
    return ChatError(
        f"{what} cannot be rendered: {type(error).__name__}: {error}. Fix the template in the folder of model.path, or "
        "the messages of the row"
    )


def with_arguments(messages: Sequence[Message]) -> list[Message]:
    """Copy the messages, with the arguments of tool calls decoded from JSON to objects: templates iterate over them."""
    return [
        message | {"tool_calls": [_decoded(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _decoded(call: Any) -> Any:
    inner = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**inner, "arguments": json.loads(inner["arguments"])}}
    except (ValueError, RecursionError):
        return call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call as the policy wrote it."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why the call cannot be executed: not JSON, no name, cut off; empty for a valid call."""
    raw: str = ""
    """The text of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sampled turn, parsed."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """In order, including those that cannot be executed."""
    finish_reason: str = "stop"
    """`stop`, or `length` if the turn was cut off."""

    def message(self) -> Message:
        """The turn as a message of a conversation, for people and rewards. It is never rendered again."""
        made: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if not call.error]
        if calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return made


class PromptRenderer(Protocol):
    """Turns rows into prompts."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of the special tokens, which only a chat template, or the tokenizer itself, writes."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str:
        """Decode, with special tokens written out."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Token ids up to the beginning of the assistant's next turn. Raises ChatError."""
        ...


def encode_text(tokenizer: PromptRenderer, text: str) -> list[int]:
    """Token ids of a text, with what the tokenizer adds to every text, such as the BOS, there once: a text that was
    rendered beforehand begins with the BOS already, and may end with the EOS."""
    behind = list(added_tokens(tokenizer)[1])
    ids = ids_to_go_on_from(tokenizer, text)
    while behind and ids[-len(behind) :] == behind:
        ids = ids[: -len(behind)]
    return [*ids, *behind]


def ids_to_go_on_from(tokenizer: PromptRenderer, text: str) -> list[int]:
    """Token ids of a text that a completion follows: with one BOS, also if the text begins with it, and without the end
    tokens that some tokenizers append to every text (T5's, and any with `add_eos_token` set)."""
    before, behind = added_tokens(tokenizer)
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - len(behind)]
    while before and ids[len(before) : 2 * len(before)] == list(before):
        ids = ids[len(before) :]
    return ids


@lru_cache(maxsize=4)
def added_tokens(tokenizer: PromptRenderer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the tokenizer puts before, and behind, every text."""
    around, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    starts = (place for place in range(len(around)) if bare and around[place : place + len(bare)] == bare)
    start = next(starts, None)
    return ((), ()) if start is None else (tuple(around[:start]), tuple(around[start + len(bare) :]))


class Chat(PromptRenderer, Protocol):
    """The chat of one tokenizer. Methods may be called from any thread, one at a time."""

    @property
    def name(self) -> str:
        """One of `names.RENDERERS`."""
        ...

    @property
    def why_single(self) -> str:
        """Why several turns are refused, and how to allow them; empty if they are not refused."""
        ...

    def why_no_calls(self, *, told: bool) -> str:
        """Why tool calls in the template's own form are never parsed, or (with `told`) why the policy is not told of
        the tools; empty if neither applies."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a turn: markers of the template that are several tokens."""
        ...

    def ends_turn(self, completion: Sequence[int]) -> bool:
        """Whether sampled tokens end with the end of the turn."""
        ...

    def parse(
        self, completion: Sequence[int], *, prompt: Sequence[int], tools: Sequence[ToolSpec] = (), finish_reason: str
    ) -> Reply:
        """Parse a sampled turn. Markers are recognised by their ids; a `<tool_call>` in plain characters is text."""
        ...

    def spell(self, text: str) -> str:
        """Break up the markers in untrusted text; spelled out in a message they would be encoded as special tokens."""
        ...

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """The ids that follow `prompt` and `completion`: the end of the turn if it has none, `messages` (none of them
        an assistant's), and the beginning of the assistant's next turn.

        Raises:
            TurnOverError: nothing can follow, for example because the turn ended within its reasoning.
            ChatError: these messages cannot.
        """
        ...
