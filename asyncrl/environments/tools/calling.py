"""Episodes in which the policy makes calls and reads their results, until it answers without a call."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from asyncrl.chat.base import ToolCall, ToolSpec
from asyncrl.data.rows.messages import TOOLS, tools_of
from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.episodes import Asked
from asyncrl.environments.tools.styles import Style
from asyncrl.errors import ConfigError, EpisodeError

Call = Callable[[str, dict[str, Any]], Awaitable[str]]
"""A tool's name and its arguments -> the text that the policy reads, also for failures. Raises EpisodeError if the tool
is not available at all, which is not the policy's fault."""


class Source(Protocol):
    """Source of tools: processes with functions, servers, a sandbox, a retriever."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    def episode(self) -> AbstractAsyncContextManager[Call]:
        """Context of one episode; yields the function that calls the tools, and frees their resources at the end."""
        ...

    def close(self) -> None: ...


class OneTool(ABC):
    """A source with one tool, which takes one text and is used by all episodes. Implements `Source`.

    Args:
        meaning: of the argument, for the policy.
        what: what the text is, in the policy's language; it is told if there is none.
    """

    def __init__(self, name: str, description: str, *, argument: str, meaning: str, what: str) -> None:
        self._argument, self._what = argument, what
        parameters = {
            "type": "object",
            "additionalProperties": False,
            "properties": {argument: {"type": "string", "description": meaning}},
            "required": [argument],
        }
        function = {"name": name, "description": description, "parameters": parameters}
        self.specs: tuple[ToolSpec, ...] = ({"type": "function", "function": function},)

    @abstractmethod
    async def answer(self, text: str) -> str:
        """Return the text that the policy reads. Raises EpisodeError: the tool is not available."""

    def episode(self) -> AbstractAsyncContextManager[Call]:
        return contextlib.nullcontext(self._call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        text = arguments.get(self._argument)
        if not isinstance(text, str) or len(arguments) > 1:
            return f"Error: wrong arguments: {name} takes {self._argument!r}, a text, and nothing else"
        return await self.answer(text) if text.strip() else f"Error: there is no {self._what}"

    def close(self) -> None:  # noqa: B027 (not every source has something to close)
        """Nothing to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of an episode, all positive."""

    max_turns: int
    """Replies per episode."""
    max_calls: int
    """Calls per episode; further ones are refused, and the policy is told."""
    max_calls_per_turn: int
    max_result: int
    """Characters of a result; the middle of a longer one is left out."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is not positive."""
        check_positive(**{each.name: getattr(self, each.name) for each in fields(self)})


class Calling(ChatEnvironment):
    """Scored by `reward.function`, which gets the last reply.

    Args:
        style: how the policy writes a call, and where it reads the result.
        tell: whether the tools are described to the policy at the start, if the style is that of the chat template.
        system: system message at the front; empty for none.
        again: message after a reply that is neither a call nor an answer, before the next try; empty ends the episode
            there.
    """

    reward_when_over = None

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        style: Style,
        budget: Budget,
        tell: bool = True,
        system: str = "",
        again: str = "",
    ) -> None:
        self._sources, self._style, self._budget, self._system = tuple(sources), style, budget, system
        self._again = again
        self._told = [spec for source in sources for spec in source.specs] if tell and style.native else []
        self.several_turns = budget.max_turns > 1 and (bool(again) or not style.one_turn)
        names = [name for source in sources for name in _names(source)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            self.close()
            raise ConfigError(f"environment.args: there are two tools named {twice[0]}. Leave one out")
        self._names = ", ".join(sorted(names))

    @property
    def asked(self) -> Asked:
        return Asked(several=self.several_turns, calls=self._style.native, told=bool(self._told))

    def specs(self, row: dict[str, Any]) -> Sequence[ToolSpec]:
        self.check_row(row)
        return self._told

    @staticmethod
    def check_row(row: Mapping[str, Any]) -> None:
        """Raises EpisodeError: the row has tools of its own, which cannot be called here."""
        if tools_of(row, "the row"):
            raise EpisodeError(
                f"the row's own `{TOOLS}` cannot be called: the policy is shown the environment's tools. Leave the "
                "column out, or use environment.name=single_turn, where calls are only written and scored"
            )

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> None:
        if self._system:
            chat.system(self._system)
        made = 0
        async with contextlib.AsyncExitStack() as stack:
            tools: dict[str, Call] = {}
            for source in self._sources:
                tools |= dict.fromkeys(_names(source), await stack.enter_async_context(source.episode()))
            for turns in range(1, self._budget.max_turns + 1):
                reply = await chat.reply(stop=self._style.stop)
                calls = self._style.calls(reply, chat)
                if turns == self._budget.max_turns:
                    return
                if not calls and self._again and self._style.unfinished(chat):
                    chat.user(self._again)
                    continue
                if not calls:
                    return
                allowed = min(self._budget.max_calls_per_turn, self._budget.max_calls - made)
                made += len(calls)
                self._style.answer(chat, calls, await self._results(calls, allowed, tools))

    async def _results(self, calls: Sequence[ToolCall], allowed: int, tools: dict[str, Call]) -> list[str]:
        """Run the calls concurrently; returns their results in the order of the calls."""
        async with asyncio.TaskGroup() as together:
            tasks = [
                together.create_task(self._result(call, place < allowed, tools)) for place, call in enumerate(calls)
            ]
        return [task.result() for task in tasks]

    async def _result(self, call: ToolCall, allowed: bool, tools: dict[str, Call]) -> str:
        if call.error:
            return f"Error: the call cannot be read: {call.error}"
        if call.name not in tools:
            return f"Error: there is no tool {call.name!r}. There are: {self._names}"
        if not allowed:
            return "Error: no more calls are allowed"
        said = await tools[call.name](call.name, call.arguments)
        return shortened(sound(said), self._budget.max_result)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    @classmethod
    def check(cls, **args: Any) -> Asked:
        """As for any environment, but it is closed: its sources have processes of their own."""
        made = cls(**args)
        made.close()
        return made.asked


def shortened(text: str, most: int) -> str:
    """Shorten to `most` characters of the text: its start, and its end, where errors are."""
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail]}\n[{len(text) - most} letters left out]\n{text[len(text) - tail :]}"


def sound(text: str) -> str:
    """Replace unpaired surrogates, which JSON can express but no file or request can hold."""
    return text.encode(errors="replace").decode()


def check_positive(**given: float) -> None:
    """Raises ConfigError for a value that is not positive."""
    for key, value in given.items():
        if not value > 0:
            raise ConfigError(f"environment.args.{key} must be above 0; got {value}")


def _names(source: Source) -> list[str]:
    return [spec["function"]["name"] for spec in source.specs]
