"""HTTP client of one server, with our errors; each kind of server has its own subclass. All on the engine's own
loop."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.servers import ServerFacts
from asyncrl.engines.server.answers import Answer, ServerGoneError
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import AsyncRLError, ConfigError, GenerationError

SILENT_S = 30.0
"""Seconds without an answer after which a server is lost, even if its connections stand. No connection is given up
sooner: when this machine is too busy to run the engine, that would lose all servers at once."""
BROKEN = 500
"""Status codes from here on: servers answer with them when their engine process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Weights that a server is to serve from now on."""

    label: str
    path: str
    """Folder of the weights; empty if the server has them in staging."""
    recompute: bool
    """Whether the KV cache of running sequences is dropped as well."""
    overtake: Callable[[], None]
    """Takes back the sequences without tokens, whose version the server could not tell."""


class ServerLink(ABC):
    """Requests to one kind of server, and how its answers are read.

    Args:
        key: sent as a bearer token; empty sends none.
        timeout_s: longest wait for any answer except tokens.
    """

    kind: str
    start_it: str
    tells_spans: bool
    """Whether it reports the weights of each token: sequences then continue over an update. If not, they start
    again."""
    broken_off: type[AsyncRLError] = ServerGoneError
    """Error to raise when an error arrives in place of a chunk."""

    def __init__(self, url: str, *, base_url: str, key: str, timeout_s: float) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=SILENT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,  # a proxy of the environment would see keys, and connect to another machine's loopback
        )

    @abstractmethod
    async def facts(self, dtype: str, shape: Mapping[str, Any] | None) -> ServerFacts:
        """Return the server's facts. Args: dtype: dtype that the run expects engines to compute in, or empty. shape:
        shape of our model, from `names.shape_of`; None skips that check.

        Raises:
            ServerGoneError: no answer. ConfigError: it cannot be used.
        """

    @abstractmethod
    async def label(self, timeout_s: float) -> str:
        """Label of the weights that it serves. Raises as `get`."""

    async def busy(self, timeout_s: float) -> float:
        """Number of sequences that run or wait there, for any client; 0 if it does not report it. Raises as `get`."""
        return 0.0

    @abstractmethod
    def stream(self, sibling: Sibling, name: str, label: str) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the chunks of a sequence, until its end. `label`: of the weights that should sample it. Raises as
        `chunks`."""

    @abstractmethod
    def read(self, chunk: Mapping[str, Any], answer: Answer) -> int:
        """Append a chunk to the answer; returns the number of new tokens. Raises ServerGoneError: it does not fit."""

    @abstractmethod
    async def abort(self, name: str) -> None: ...

    @abstractmethod
    async def score(self, ids: NDArray[np.int32], name: str) -> NDArray[np.float32]:
        """[T] -> [T - 1]; see `Engine.score`."""

    @abstractmethod
    async def load(self, load: Load) -> None:
        """Load weights; returns once the server serves them and continues. Raises ServerGoneError: it does not serve
        them."""

    async def get(self, path: str, part: str, timeout_s: float | None = None) -> Any:
        """Return `part` of the answer.

        Raises:
            ServerGoneError: no answer, or one without that part.
            ConfigError: there is no such endpoint, it redirects, or the key is wrong.
            GenerationError: the server refuses.
        """
        return self.part(await self.ask("GET", path, timeout_s=timeout_s), part)

    async def text(self, path: str, timeout_s: float) -> str:
        """Return an answer that is not JSON. Raises as `get`."""
        return await self.ask("GET", path, timeout_s=timeout_s, text=True)

    async def post(self, path: str, body: dict[str, Any] | None = None, **parameters: str) -> Any:
        """Raises as `get`."""
        return await self.ask("POST", path, body, parameters)

    async def chunks(self, path: str, body: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a generation; only the last chunk ends it, never a broken line.

        Raises:
            ServerGoneError: it broke off.
            GenerationError: the server refuses the request.
        """
        try:
            timeout = httpx.Timeout(None, connect=SILENT_S)
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
        except (httpx.HTTPError, json.JSONDecodeError, RecursionError) as error:  # endlessly nested lists
            raise self._gone(error) from error
        raise ServerGoneError(f"{self.url} broke off {name!r}")

    async def check_generation(self, path: str) -> None:
        """Raises ConfigError: it does not generate from tokens, or does not accept our key."""
        try:
            answer = await self._client.post(path, json={})
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if answer.status_code not in (400, 422):  # an empty request is refused with one of these
            self._refuse(answer, path)

    def unusable(self, why: str) -> ConfigError:
        return ConfigError(f"engine.urls: {self.url} cannot be used: {why}")

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
        """Return the answer; with `text` unparsed, as it need not be JSON."""
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
            raise ServerGoneError(
                f"{self.url} did not answer as {self.kind} does: {name!r} is missing: {answer!s:.200}"
            )
        return answer[name]

    def _refuse(self, answer: httpx.Response, what: str) -> None:
        said = f"{self.url} answered {what} with status {answer.status_code}: {answer.text:.300}"
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"{said}. Its --api-key is not the key that was sent. Export it, and name the variable with "
                "engine.key_env=NAME"
            )
        if answer.is_redirect:
            raise ConfigError(
                f"{said}. It redirects to an address that was not checked. Give that address in engine.urls"
            )
        if answer.status_code == 404:
            raise ConfigError(f"{said}. {self.start_it}")
        if answer.status_code >= BROKEN:
            raise ServerGoneError(said)
        raise GenerationError(said)

    def _gone(self, error: Exception) -> ServerGoneError:
        return ServerGoneError(f"{self.url} gave no answer ({type(error).__name__}: {error})")
