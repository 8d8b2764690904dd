"""Tools of servers of the Model Context Protocol: one process per server and worker, or one that others started, behind
an address. A separate thread talks to them.

consumes:     calls of episodes
waits for:    the servers, each with a deadline
unblocked by: their answers, their ends, or the deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self

import httpx2
from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    ContentBlock,
    EmbeddedResource,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from asyncrl.chat.base import ToolSpec
from asyncrl.environments.tools.calling import Call
from asyncrl.errors import ConfigError, EpisodeError
from asyncrl.loops import LoopThread

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for a server to start and list its tools."""
STOP_S = 20.0
CONNECT_S, SILENT_S = 30.0, 300.0
"""Seconds to connect to an address, and between two bytes of an answer: the defaults of the package mcp."""
SESSION = "mcp-session-id"
"""HTTP header with which a request belongs to a session."""
LOST = (CONNECTION_CLOSED, INVALID_REQUEST)
"""Codes of an MCPError of a ping after which a server has to be connected to anew: it has ended, or, behind an address,
it was started again and does not know the session. Tools use the same codes for errors of their own."""
MOST_PAGES = 100
"""Limit on the pages of a server's list of tools."""


class Servers:
    """Starts all servers and maps each tool to its server. Implements `calling.Source`.

    Args:
        places: commands that start a server, and addresses (`http://...`) of servers that others started.
        timeout_s: limit of one call.

    Raises:
        ConfigError: a server did not start, or listed no tools.
    """

    def __init__(self, places: Sequence[str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = LoopThread("mcp")
        self._servers = [_Server(place) for place in places]
        self._owner: dict[str, _Server] = {}
        self.specs: list[ToolSpec] = []
        try:
            for server in self._servers:
                for spec in self._loop.submit(server.start()).result():
                    self._owner[spec["function"]["name"]] = server
                    self.specs.append(spec)
        except BaseException:
            self.close()
            raise

    def episode(self) -> AbstractAsyncContextManager[Call]:
        return contextlib.nullcontext(self._call)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        future = self._loop.submit(self._owner[name].call(name, dict(arguments), self.timeout_s))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        for server in self._servers:
            with contextlib.suppress(FutureTimeout):
                self._loop.submit(server.stop()).result(STOP_S)
        self._loop.close()


_NOT_TAKEN: contextvars.ContextVar[list[str]] = contextvars.ContextVar("not_taken")
"""Of the call that this context makes: why no tool has seen it. Empty while one may have."""


class _Client(httpx2.AsyncClient):
    """Notes a call that reached no tool: nobody listens at the address, or the server does not know the session (404),
    because it was started again."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            self._note(request, f"{type(error).__name__}: {error}")
            raise
        # Without a session, 404 may be a tool's own error.
        if response.status_code == 404 and SESSION in request.headers:
            self._note(request, "it does not know the session")
        return response

    @staticmethod
    def _note(request: httpx2.Request, why: str) -> None:
        # A call's context also has the requests that follow it: the rest of its answer (GET), its cancellation.
        if request.method == "POST" and json.loads(request.content).get("method") == "tools/call":
            _NOT_TAKEN.get([]).append(why)


class _Messages:
    """The messages of a server, counted; calls `ended` after the last one."""

    def __init__(self, inner: Any, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended
        self.count = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await anext(self._inner)
        except StopAsyncIteration:
            self._ended()
            raise
        self.count += 1
        return message


@dataclass(slots=True)
class _Link:
    """A connection to a server that is up."""

    session: ClientSession
    messages: _Messages
    stop: asyncio.Event
    """Ends it."""


class _Server:
    """One server. One task owns its streams and holds them open; calls come from other tasks."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._again: asyncio.Task[Any] | None = None
        self._looking: set[asyncio.Task[None]] = set()

    async def start(self) -> list[ToolSpec]:
        """Start the server; returns its tools. Raises ConfigError.

        waits for: the list of its tools; unblocked by: that, the server's end, or START_S.
        """
        up: asyncio.Future[list[ToolSpec]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._keep(up, self._stop))
        try:
            async with asyncio.timeout(START_S):
                return await up
        except TimeoutError as error:
            self._task.cancel()
            raise ConfigError(f"environment.args.mcp: {self._place!r} named no tools within {START_S:g} s") from error

    async def _keep(self, up: asyncio.Future[list[ToolSpec]], stop: asyncio.Event) -> None:
        try:
            async with _streams(self._place) as (read, write):
                messages = _Messages(read, lambda: self._leave(stop))
                async with ClientSession(messages, write) as session:  # pyright: ignore[reportArgumentType]
                    await session.initialize()
                    specs = await _specs(session)
                    if not specs:
                        raise ConfigError(f"environment.args.mcp: {self._place!r} has no tools")
                    self._link = _Link(session, messages, stop)
                    if not up.done():  # given up after START_S
                        up.set_result(specs)
                    await stop.wait()
        # A user's server, and a library that raises many errors when it is gone.
        except Exception as error:
            if up.done():
                log.warning("the MCP server %r is gone: %s: %s", self._place, type(error).__name__, error)
            else:
                while isinstance(error, ExceptionGroup):  # a group of the library's tasks: the error is inside
                    error = error.exceptions[0]
                known = error if isinstance(error, ConfigError) else None
                why = f"{type(error).__name__}: {error}"
                up.set_exception(known or ConfigError(f"environment.args.mcp: {self._place!r} did not start: {why}"))
        finally:
            self._leave(stop)

    def _leave(self, stop: asyncio.Event) -> None:
        """End this connection, so that the next call makes another; no effect if one was made since."""
        stop.set()
        if self._link is not None and self._link.stop is stop:
            self._link = None

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call a tool; returns the text that the policy reads. A call that no tool has seen is made once more, on a new
        connection. Raises EpisodeError: there is no server to call."""
        for _ in range(2):
            link, not_taken = self._link or await self._restarted(), list[str]()
            _NOT_TAKEN.set(not_taken)
            said = await self._called(link, name, arguments, timeout_s)
            if not not_taken:
                return said
            self._leave(link.stop)
        raise EpisodeError(f"environment.args.mcp: {self._place!r} takes no calls: {not_taken[0]}")

    async def _called(self, link: _Link, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        try:
            async with asyncio.timeout(timeout_s):
                result = await link.session.call_tool(name, arguments)
        except TimeoutError:
            looking = asyncio.create_task(self._look(link, timeout_s))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
            return f"Error: the call took longer than {timeout_s:g} s"
        # Any error of the server or the library is returned to the policy, and ends no worker.
        except Exception as error:
            if not _NOT_TAKEN.get():
                await self._look(link, timeout_s)
            return f"Error: {type(error).__name__}: {error}"
        text = "\n".join(_said(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return f"Error: {text}" if result.is_error else text

    async def _look(self, link: _Link, timeout_s: float) -> None:
        """After a failed call: leave a server that is gone, or that says nothing at all any more. A call's error or
        delay does not tell: both may be the tool's own.

        waits for: the answer to a ping; unblocked by: that, or the deadline.
        """
        before = link.messages.count
        try:
            async with asyncio.timeout(timeout_s):
                await link.session.send_ping()
            return
        except TimeoutError:
            if link.messages.count > before:  # busy with other calls
                return
            log.warning("the MCP server %r has answered nothing for %g s", self._place, timeout_s)
        except MCPError as error:
            if error.code not in LOST:
                return  # it knows no pings, but answers
        except Exception as error:  # the library raises many kinds when a server is gone
            log.warning("the MCP server %r is gone: %s: %s", self._place, type(error).__name__, error)
        self._leave(link.stop)

    async def _restarted(self) -> _Link:
        """Start the server once for all calls that need it, even if the first of them gives up. No part of the call's
        time, nor of what the policy is told: it cannot help that its server is gone.

        Raises:
            EpisodeError: it does not start, or ended at once.
        """
        if self._again is None or self._again.done():
            self._again = asyncio.create_task(self._started_again())
        try:
            await asyncio.shield(self._again)
        except ConfigError as error:
            raise EpisodeError(f"a server was lost and cannot be started again: {error}") from error
        if self._link is None:
            raise EpisodeError(f"environment.args.mcp: {self._place!r} was started again and ended at once")
        return self._link

    async def _started_again(self) -> None:
        log.warning("the MCP server %r is started again", self._place)
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_S)
        await self.start()

    async def stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._stop.set()
        if self._task is not None and not (await asyncio.wait([self._task], timeout=STOP_S / 3))[0]:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=STOP_S / 2)  # until the library has ended the process


def _streams(place: str) -> AbstractAsyncContextManager[Any]:
    """Connect to a server at an address, or start one with a command."""
    if place.startswith(("http://", "https://")):
        return _reached(place)
    words = shlex.split(place)
    return stdio_client(StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ)))


@contextlib.asynccontextmanager
async def _reached(address: str) -> AsyncIterator[Any]:
    timeout = httpx2.Timeout(CONNECT_S, read=SILENT_S)
    async with (
        _Client(follow_redirects=True, timeout=timeout) as client,
        streamable_http_client(address, http_client=client) as streams,
    ):
        yield streams


def _said(part: ContentBlock) -> str:
    """A part of an answer as text, which is all that the policy reads; other content is named in brackets."""
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource):
        held = part.resource
        return held.text if isinstance(held, TextResourceContents) else f"[{held.mime_type or 'binary'}: {held.uri}]"
    if isinstance(part, ResourceLink):
        return f"[{part.name}: {part.uri}]"
    return f"[{part.type}: {part.mime_type}]"


async def _specs(session: ClientSession) -> list[ToolSpec]:
    found: list[ToolSpec] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            found.append({"type": "function", "function": function})
        cursor = page.next_cursor
        if not cursor:
            break
    return found
