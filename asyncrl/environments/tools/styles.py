"""Call styles: each defines how a policy writes a call, and where it reads the result."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.chat.base import Reply, ToolCall
from asyncrl.environments.conversation import Conversation


class Style(ABC):
    native = False
    """Whether it is the style of the chat template, which then describes the tools to the policy."""
    one_turn = False
    """Whether results are inserted into the policy's own turn: any chat template works then."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a reply, besides the end of a turn."""
        return ()

    @abstractmethod
    def calls(self, reply: Reply, chat: Conversation) -> Sequence[ToolCall]:
        """Return the calls in the last reply; an empty result ends the episode."""

    @abstractmethod
    def answer(self, chat: Conversation, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        """Add the results before the next reply."""

    def unfinished(self, chat: Conversation) -> bool:
        """Whether the last reply, which calls nothing, is not an answer either."""
        return False


class Native(Style):
    """As the model was trained: tool calls of its chat template, with results as tool messages."""

    native = True

    def calls(self, reply: Reply, chat: Conversation) -> Sequence[ToolCall]:
        return reply.tool_calls

    def answer(self, chat: Conversation, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        for call, result in zip(calls, results, strict=True):
            chat.result(call, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Style):
    """Fenced blocks in the reply, all of one reply together as one call; the result is a user message."""

    tool: str
    argument: str
    languages: tuple[str, ...]
    """Languages after the opening fence; a block of another language, or of none, is not a call."""

    def calls(self, reply: Reply, chat: Conversation) -> Sequence[ToolCall]:
        found = FENCED.findall(reply.content)
        blocks = [text for language, text in found if language.lower() in self.languages]
        if not blocks:
            return ()
        return (ToolCall(id="call_0", name=self.tool, arguments={self.argument: "\n".join(blocks)}),)

    def answer(self, chat: Conversation, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        for result in results:
            chat.user(f"```output\n{chat.spell(result).rstrip()}\n```")


FENCED = re.compile(r"^```([\w+-]+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Style):
    """`<tag>call</tag>` in the policy's own turn, followed by `<result>its result</result>`; the policy then
    continues."""

    tool: str
    argument: str
    tag: str
    result: str
    final: str = ""
    """Another tag, whose end is the end of the episode; empty for none."""

    one_turn = True

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in (self.tag, self.final) if tag)

    def calls(self, reply: Reply, chat: Conversation) -> Sequence[ToolCall]:
        # Searched in all sampled text: a call may be among the reasoning.
        found = re.search(rf"<{self.tag}>((?:(?!<{self.tag}>).)*?)</{self.tag}>", chat.last_text, re.DOTALL)
        if found is None or not chat.turn_open:
            return ()
        return (ToolCall(id="call_0", name=self.tool, arguments={self.argument: found.group(1).strip()}),)

    def answer(self, chat: Conversation, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        for result in results:
            chat.insert(f"\n<{self.result}>\n{chat.spell(result).strip()}\n</{self.result}>\n")

    def unfinished(self, chat: Conversation) -> bool:
        cut = chat.replies[-1].finish_reason == "length"
        return bool(self.final) and not cut and f"</{self.final}>" not in chat.last_text
