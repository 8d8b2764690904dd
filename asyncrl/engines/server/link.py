"""One server over HTTP, with our errors, and what its kind makes of our questions. All on the engine's own loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.server.answers import Answer, ServerGoneError
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import AsyncRLError, ConfigError, GenerationError

CONNECT_S = 10.0
BROKEN = 500
"""Statuses from here on: servers answer so when their engine process is gone."""


class Facts(Protocol):
    """Of one server."""

    @property
    def max_length(self) -> int: ...

    @property
    def width(self) -> int:
        """Processes that hold the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Weights that a server is to serve from now on."""

    label: str
    path: str
    """Of a folder with them; empty where the server has them in staging."""
    recompute: bool
    """Keys of running sequences go as well."""
    overtake: Callable[[], None]
    """Takes back what has no tokens of which the server could say the version."""


class Dialect(Protocol):
    """What a kind of server is asked, and how its answers are read."""

    url: str
    tells_spans: bool
    """It says of each token of which weights it is: sequences go on over an update. If not, they begin again."""

    async def facts(self, dtype: str, shape: Mapping[str, Any] | None) -> Facts:
        """Args: dtype: what the run takes engines to compute in, or empty. shape: of our model, as from
        `names.shape_of`; None leaves that open.

        Raises:
            ServerGoneError: no answer. ConfigError: it cannot be used.
        """
        ...

    async def label(self, timeout_s: float) -> str:
        """Of the weights that it serves. Raises as `ServerLink.get`."""
        ...

    async def busy(self, timeout_s: float) -> float:
        """Sequences that it makes or that wait there, whoever asked for them; 0 where it does not tell. Raises as
        `ServerLink.get`."""
        ...

    def stream(self, sibling: Sibling, name: str, label: str) -> AsyncIterator[Mapping[str, Any]]:
        """Chunks of a sequence, until its end. `label`: of the weights that it should be of.

        Raises:
            ServerGoneError: it broke off. GenerationError: the server refuses the request.
        """
        ...

    def read(self, chunk: Mapping[str, Any], answer: Answer) -> int:
        """Puts a chunk to what came before; tokens that are new. Raises ServerGoneError: it is none that fits."""
        ...

    async def abort(self, name: str) -> None: ...

    async def score(self, ids: NDArray[np.int32], name: str) -> NDArray[np.float32]:
        """[T] -> [T - 1]; see `Engine.score`."""
        ...

    async def load(self, load: Load) -> None:
        """Returns when it serves them and goes on. Raises ServerGoneError: it does not, whatever it serves."""
        ...

    async def close(self) -> None: ...


class ServerLink:
    """Args: key: sent as a bearer; empty is none. timeout_s: longest wait for any answer but tokens."""

    kind = ""
    start_it = ""
    broken_off: type[AsyncRLError] = ServerGoneError
    """What an error in place of a chunk means."""

    def __init__(self, url: str, *, base_url: str, key: str, timeout_s: float) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # a proxy of the environment would see keys, and reach another machine's loopback
        )

    async def get(self, path: str, part: str, timeout_s: float | None = None) -> Any:
        """`part` of the answer.

        Raises:
            ServerGoneError: no answer, or one without it.
            ConfigError: there is no such endpoint, it is elsewhere, or the key is wrong.
            GenerationError: it refuses.
        """
        return self.part(await self.ask("GET", path, timeout_s=timeout_s), part)

    async def text(self, path: str, timeout_s: float) -> str:
        """Of an answer that is no JSON. Raises as `get`."""
        return await self.ask("GET", path, timeout_s=timeout_s, text=True)

    async def post(self, path: str, body: dict[str, Any] | None = None, **parameters: str) -> Any:
        """Raises as `get`."""
        return await self.ask("POST", path, body, parameters)

    async def chunks(self, path: str, body: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """Of a generation; ended by the last, never by a broken line.

        Raises:
            ServerGoneError: it broke off.
            GenerationError: the server refuses the request.
        """
        try:
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            async with self._client.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    self._refuse(answer, f"request {name!r}")
                async for line in answer.aiter_lines():
                    text = line.removeprefix("data: ")
                    if text == line:
                        continue
                    if text == "[DONE]":
                        return
                    chunk = json.loads(text)
                    if not isinstance(chunk, dict) or "error" in chunk:
                        raise self.broken_off(f"{self.url} broke off {name!r}: {text:.300}")
                    yield chunk
        except (httpx.HTTPError, json.JSONDecodeError, RecursionError) as error:  # the last: lists in lists without end
            raise self._gone(error) from error
        raise ServerGoneError(f"{self.url} broke off {name!r}")

    async def check_generation(self, path: str) -> None:
        """Raises ConfigError: it does not generate from tokens, or not with our key."""
        try:
            answer = await self._client.post(path, json={})
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if answer.status_code not in (400, 422):  # an empty request is refused for what it is
            self._refuse(answer, path)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self,
        kind: str,
        path: str,
        body: dict[str, Any] | None = None,
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
        text: bool = False,
    ) -> Any:
        """The answer; as it came where it is `text`, which need be no JSON."""
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            answer = await self._client.request(kind, path, json=body, params=parameters, timeout=timeout)
            if answer.status_code != httpx.codes.OK:
                self._refuse(answer, path)
            if text:
                return answer.text
            return answer.json() if answer.content else None
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._gone(error) from error

    def part(self, answer: Any, name: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise ServerGoneError(f"{self.url} gave no answer of {self.kind}, one without {name!r}: {answer!s:.200}")
        return answer[name]

    def _refuse(self, answer: httpx.Response, what: str) -> None:
        said = f"{self.url} answered {what} with status {answer.status_code}: {answer.text:.300}"
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"{said}. Its --api-key is not what we sent: export it, and name the variable with engine.key_env=NAME"
            )
        if answer.is_redirect:
            raise ConfigError(f"{said}. It sends elsewhere, where nothing was judged: give that address in engine.urls")
        if answer.status_code == 404:
            raise ConfigError(f"{said}. {self.start_it}")
        if answer.status_code >= BROKEN:
            raise ServerGoneError(said)
        raise GenerationError(said)

    def _gone(self, error: Exception) -> ServerGoneError:
        return ServerGoneError(f"{self.url} gave no answer ({type(error).__name__}: {error})")
