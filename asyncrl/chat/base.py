"""The chat seam: messages to token ids, sampled ids to a reply, and a sampled prefix on to the next turn.

What was sampled is never rendered again: `extend` gives the ids that come after it, and those before stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError

Message = dict[str, Any]
"""As in OpenAI's chat API: `role`, `content`, of an assistant `tool_calls`, of a tool `tool_call_id` and `name`."""
ToolSpec = dict[str, Any]
"""As there too: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ChatError(AsyncRLError, ValueError):
    """Messages cannot be rendered, or a sampled turn cannot be followed by another."""


def no_template() -> ChatError:
    """For whoever has messages to render and nothing to render them by."""
    return ChatError("the tokenizer has no chat template. Use an instruction-tuned model, or write the prompt as text")


def no_place_for_tools() -> ChatError:
    """For whoever has tools to tell of and a chat template that leaves them out."""
    return ChatError(
        "the chat template has no place for `tools`, so the policy would never be told of them. Take a model whose "
        "template has one, or tell of them in a system message and leave the `tools` out"
    )


def unrenderable(what: str, error: Exception) -> ChatError:
    """For one list of messages: `what` was to render them and raised `error`."""
    return ChatError(
        f"{what} cannot be rendered: {type(error).__name__}: {error}. Mend the template in the folder of model.path, "
        "or the messages of the row"
    )


def with_arguments(messages: Sequence[Message]) -> list[Message]:
    """Copies, in which the arguments of calls are objects where they were JSON text: templates go through them."""
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
    """One call as the policy wrote it."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be carried out: no JSON, no name, cut off; empty for a sound one."""
    raw: str = ""
    """Its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sampled turn, read."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """In order, those that cannot be carried out included."""
    finish_reason: str = "stop"
    """`stop`, or `length` where it was cut."""

    def message(self) -> Message:
        """As a message of a conversation, for people and for rewards: nothing is ever rendered of it again."""
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
    """What turns rows into prompts."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens written out."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Token ids up to where the assistant's next turn begins. Raises ChatError."""
        ...


def ids_to_go_on_from(tokenizer: PromptRenderer, text: str) -> list[int]:
    """Of a text that a completion follows: without the end that some tokenizers (T5's, and any whose `add_eos_token` is
    set) write behind whatever they are given."""
    ids = tokenizer.encode(text)
    return ids[: len(ids) - _tokens_behind(tokenizer)]


@lru_cache(maxsize=4)
def _tokens_behind(tokenizer: PromptRenderer) -> int:
    """How many it writes behind a text."""
    around, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    ends = (place + len(bare) for place in range(len(around)) if bare and around[place : place + len(bare)] == bare)
    return len(around) - next(ends, len(around))


class Chat(PromptRenderer, Protocol):
    """Of one tokenizer. Methods may be called from any one thread at a time."""

    @property
    def name(self) -> str:
        """Of `names.RENDERERS`."""
        ...

    @property
    def why_single(self) -> str:
        """Why several turns are refused, with the way out; empty where they are not."""
        ...

    def why_no_calls(self, *, told: bool) -> str:
        """Why no call of a tool in the template's own form is ever read, or (`told`) why the policy knows of no tool;
        empty where neither is so."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends a turn."""
        ...

    def parse(
        self, completion: Sequence[int], *, prompt: Sequence[int], tools: Sequence[ToolSpec] = (), finish_reason: str
    ) -> Reply:
        """Read a sampled turn. Markers count as ids: a `<tool_call>` that is written in letters is text."""
        ...

    def spell(self, text: str) -> str:
        """A stranger's text with its markers broken: written out in a message they would be what they name."""
        ...

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """What follows `prompt` and `completion`: the end of the turn where it has none, `messages` (no assistant's),
        and the beginning of the assistant's next turn.

        Raises:
            ChatError: nothing can follow, for example because the turn ended within its reasoning.
        """
        ...
