"""The server that agents talk to: OpenAI's chat completions on loopback, one key per episode.

consumes:     requests of this worker's agents
waits for:    the next request; the engine, for each of them
unblocked by: a request; the engine's answer, or the end of its episode
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Collection, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncrl.environments.openai.answers import choice_of, completion_of, error_of, stream_of
from asyncrl.environments.openai.calls import OVER, Calls, Turn
from asyncrl.environments.openai.requests import Call, Refused, read_call
from asyncrl.errors import AsyncRLError, GenerationError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
SESSION = "x-session-id"
KEEP_ALIVE_S = 600
"""Seconds; longer than agents pause between calls, since a client that sends into a closed connection reports a
failure."""
START_S = 30.0
STOP_S = 10.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the worker handles signals."""
        yield


class Endpoint:
    """Serves the policy to agents.

    Args:
        model: name of the policy in requests.
        ignore: parameters of requests that are ignored.
    """

    def __init__(self, model: str, ignore: Collection[str] = ()) -> None:
        self._model, self._ignore = model, ignore
        self._episodes: dict[str, Calls] = {}
        """Calls by key of the episode."""
        self._numbers = 0
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_place, Refused: _refused})
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.url = ""
        """`base_url` for agents, once it is started."""

    async def start(self) -> None:
        """Start on this event loop, if not started yet.

        Raises:
            AsyncRLError: it does not start.
        """
        async with self._starting:
            if self._task is not None and not self._task.done():
                return
            listener = socket.create_server((HOST, 0), backlog=2048)
            # asyncio sets this only for sockets that name their protocol, unlike this one: without it the body of an
            # answer waits 40 ms for the acknowledgement of its head. Connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            config = uvicorn.Config(
                self._app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
            self._server = _Server(config)
            self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
            async with asyncio.timeout(START_S):
                while not self._server.started:
                    if self._task.done():
                        raise AsyncRLError(f"the endpoint of environment.name=openai ended: {self._task.exception()}")
                    await asyncio.sleep(0.001)
            self.url = f"http://{HOST}:{listener.getsockname()[1]}/v1"

    async def close(self) -> None:
        """waits for: the server to end; unblocked by: its next tick, or STOP_S."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait([self._task], timeout=STOP_S)

    @contextlib.contextmanager
    def serving(self, calls: Calls) -> Iterator[str]:
        """Serve an episode inside the context; yields its key."""
        key = secrets.token_urlsafe(32)
        self._episodes[key] = calls
        try:
            yield key
        finally:
            del self._episodes[key]
            calls.close()

    def _of(self, request: Request) -> Calls:
        """Return the calls of the request's episode. Raises Refused."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Clients shared by many episodes, like those of verifiers, name the episode in another header.
        names = [key.strip() if kind.lower() == "bearer" else "", request.headers.get(SESSION, "")]
        calls = next((self._episodes[name] for name in names if name in self._episodes), None)
        if calls is None:
            raise Refused(401, f"this needs the api_key that the agent was given: {OVER}", "invalid_api_key")
        return calls

    async def _models(self, request: Request) -> Response:
        self._of(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> Response:
        calls = self._of(request)
        try:
            body = json.loads(await request.body())
            once = request.headers.get("idempotency-key", "")
            call = read_call(body, model=self._model, ignore=self._ignore, once=once)
        except ClientDisconnect:  # its agent was cancelled or died: there is nobody to answer
            return Response(status_code=499)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not valid JSON: {error}") from error
        try:
            turns = await calls.ask(call)
        except AsyncRLError as error:
            # The engine's failure may be temporary: clients retry, and the episode fails if that fails too.
            final = not isinstance(error, GenerationError)
            raise Refused(500, f"the engine gave no answer: {error}", "engine_failed", final=final) from error
        return self._answer(call, turns)

    def _answer(self, call: Call, turns: list[Turn]) -> Response:
        self._numbers += 1
        completion = completion_of(
            [choice_of(turn.message, turn.reply, place) for place, turn in enumerate(turns)],
            name=f"chatcmpl-{self._numbers}",
            model=self._model,
            prompt_tokens=len(turns[0].prompt),
            completion_tokens=sum(len(turn.completion.token_ids) for turn in turns),
        )
        if not call.stream:
            return JSONResponse(completion)
        return Response(stream_of(completion, tell_usage=call.tell_usage), media_type="text/event-stream")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"x-should-retry": "false"} if error.final else {}
    return JSONResponse(error_of(error), error.status, headers)


def _no_such_place(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    served = "POST /v1/chat/completions and GET /v1/models are served here"
    said = f"{request.method} {request.url.path}: {error.detail}. {served}"
    return _refused(request, Refused(error.status_code, said, "unknown_url"))
