"""`environment.name=tools`: the policy calls functions and reads what they give, until it answers without a call."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from asyncrl.chat.base import Reply, ToolCall, ToolSpec
from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.tools.sessions import Session, SharedSessions, ToolHost
from asyncrl.errors import ConfigError


class Tools(ChatEnvironment):
    """Scored by `reward.function`, which gets the last reply.

    Args:
        functions: `file.py:name` or `package.module:name` of typed functions, and of classes, whose public methods are
            tools and of which each episode has one object.
        mcp: commands that start servers of the Model Context Protocol, which talk through their standard streams.
        max_turns: replies of an episode.
        max_calls: calls of an episode; what is asked for beyond is refused, and the policy told.
        max_calls_per_turn: likewise, of one reply.
        timeout_s: of one call; past it its process is ended, and the policy told.
        processes: in which functions without state run, side by side.
        tell: whether the policy is told of the functions before it begins.
        system: message that goes to the front.
        max_result: letters of a result; the rest is left out.
    """

    reward_when_over = None

    def __init__(
        self,
        functions: Sequence[str] = (),
        mcp: Sequence[str] = (),
        max_turns: int = 8,
        max_calls: int = 32,
        max_calls_per_turn: int = 8,
        timeout_s: float = 10.0,
        processes: int = 4,
        tell: bool = True,
        system: str = "",
        max_result: int = 8000,
    ) -> None:
        check_args(functions, mcp, locals())
        self._max_turns, self._max_calls, self._per_turn = max_turns, max_calls, max_calls_per_turn
        self._timeout_s, self._tell, self._system, self._max_result = timeout_s, tell, system, max_result
        self.several_turns = max_turns > 1
        self._host = ToolHost(functions) if functions else None
        self._shared = SharedSessions(self._host, processes) if self._host else None
        self._servers: Any = late_import("mcp_servers").Servers(mcp, timeout_s) if mcp else None
        served: list[ToolSpec] = self._servers.specs if self._servers is not None else []
        self._specs: list[ToolSpec] = [*(self._host.specs if self._host else []), *served]
        self._served = {spec["function"]["name"] for spec in served}
        names = [spec["function"]["name"] for spec in self._specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            self.close()
            raise ConfigError(f"environment.args: there are two tools named {twice[0]}. Leave one out")
        self._names = set(names)

    @staticmethod
    def check(**args: Any) -> None:
        """Before a start, in a process of its own: makes one and ends it. Raises ConfigError."""
        Tools(**args).close()

    def specs(self, row: dict[str, Any]) -> Sequence[ToolSpec]:
        return self._specs if self._tell else ()

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> None:
        if self._system:
            chat.system(self._system)
        calls = 0
        own: list[Session] = []
        turn = asyncio.Lock()
        try:
            for turns in range(1, self._max_turns + 1):
                reply = await chat.reply()
                if not reply.tool_calls or turns == self._max_turns:
                    return
                allowed = min(self._per_turn, self._max_calls - calls)
                calls += len(reply.tool_calls)
                for call, text in zip(reply.tool_calls, await self._answers(reply, allowed, own, turn), strict=True):
                    chat.result(call, text)
        finally:
            for session in own:
                session.kill()

    async def _answers(self, reply: Reply, allowed: int, own: list[Session], turn: asyncio.Lock) -> list[str]:
        """What each call gave, side by side, in the order of the calls."""
        async with asyncio.TaskGroup() as together:
            tasks = [
                together.create_task(self._answer(call, place < allowed, own, turn))
                for place, call in enumerate(reply.tool_calls)
            ]
        return [task.result() for task in tasks]

    async def _answer(self, call: ToolCall, allowed: bool, own: list[Session], turn: asyncio.Lock) -> str:
        if call.error:
            return f"Error: the call cannot be read: {call.error}"
        if call.name not in self._names:
            return f"Error: there is no tool {call.name!r}. There are: {', '.join(sorted(self._names))}"
        if not allowed:
            return "Error: no more calls are allowed"
        _, text = await self._call(call, own, turn)
        if len(text) <= self._max_result:
            return text
        return f"{text[: self._max_result]}\n[{len(text) - self._max_result} letters left out]"

    async def _call(self, call: ToolCall, own: list[Session], turn: asyncio.Lock) -> tuple[bool, str]:
        if call.name in self._served:
            return await self._servers.call(call.name, call.arguments)
        assert self._host is not None and self._shared is not None  # or it would have no such tool
        if call.name not in self._host.stateful:
            async with self._shared.lent() as session:
                return await session.call(call.name, call.arguments, self._timeout_s)
        async with turn:  # one object per episode: the first call makes its process, all others use it
            if not own:
                own.append(await self._host.open())
        return await own[0].call(call.name, call.arguments, self._timeout_s)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if self._servers is not None:
            self._servers.close()


def check_args(functions: Sequence[str], mcp: Sequence[str], given: dict[str, Any]) -> None:
    """Raises ConfigError for what could never work."""
    if not functions and not mcp:
        raise ConfigError(
            "environment.name=tools has no tools. Name functions, environment.args.functions=[file.py:name], or "
            "servers, environment.args.mcp=[COMMAND]"
        )
    for key, value in (("functions", functions), ("mcp", mcp)):
        if isinstance(value, str) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"environment.args.{key} is a list: environment.args.{key}=[...]; got {value!r}")
    for key in ("max_turns", "max_calls", "max_calls_per_turn", "timeout_s", "processes", "max_result"):
        if not given[key] > 0:
            raise ConfigError(f"environment.args.{key} must be above 0; got {given[key]}")


def late_import(module: str) -> Any:
    """`asyncrl.environments.tools.<module>`, imported now: what it needs is an extra, and its import takes seconds."""
    try:
        return importlib.import_module(f"asyncrl.environments.tools.{module}")
    except ImportError as error:
        raise ConfigError(
            f"environment.args.mcp needs the package mcp: pip install 'asyncrl[agents]' ({error})"
        ) from error
