"""One `vllm serve` over HTTP, with our errors. Everything here runs on the engine's own loop.

    /inference/v1/generate           tokens in, tokens out (needs --enable-scale-out; guarded by the server's key)
    /inference/v1/abort_requests     likewise
    /pause /resume /update_weight_version /weight_info /server_info /collective_rpc
                                     developer mode (VLLM_SERVER_DEV_MODE=1), which no key guards

As in vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, EngineDiedError, GenerationError

CONNECT_S = 10.0
BROKEN = 500
"""Statuses from here on: vLLM answers so when its engine process is gone."""


class ServerGoneError(EngineDiedError):
    """This server gives no answer, or not as the one that was given our weights; others may."""


class ServerLink:
    """Args: key: sent as a bearer; empty is none. timeout_s: longest wait for any answer but tokens."""

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
        return self._part(await self._ask("GET", path, timeout_s=timeout_s), part)

    async def post(self, path: str, body: dict[str, Any] | None = None, **parameters: str) -> Any:
        """Raises as `get`."""
        return await self._ask("POST", path, body, parameters)

    async def call_workers(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """One of `vllm.plugin.WorkerExtension` in every worker process of the server."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        return self._part(answer, "results")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a generation, each with the tokens that are new; ended by the last, never by a broken line.

        Raises:
            ServerGoneError: it broke off.
            GenerationError: the server refuses the request.
        """
        name = body["request_id"]
        try:
            async with self._client.stream(
                "POST", "/inference/v1/generate", json=body, timeout=httpx.Timeout(None, connect=CONNECT_S)
            ) as answer:
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
                        raise ServerGoneError(f"{self.url} broke off {name!r}: {text:.300}")
                    yield chunk
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise self._gone(error) from error
        raise ServerGoneError(f"{self.url} broke off {name!r}")

    async def score(self, ids: NDArray[np.int32], name: str) -> NDArray[np.float32]:
        """[T] -> [T - 1]; see `Engine.score`. The prefix cache is not read: it has keys, but no log-probs."""
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0}
        sampling |= {"detokenize": False, "skip_reading_prefix_cache": True}
        body = {"request_id": name, "token_ids": ids.tolist(), "sampling_params": sampling}
        answer = await self.post("/inference/v1/generate", body)
        found = self._part(answer, "prompt_logprobs") or []
        if len(found) != len(ids):
            raise GenerationError(f"{self.url} scored {len(found) - 1} of {len(ids) - 1} tokens")
        chosen = [by_token[str(token)]["logprob"] for token, by_token in zip(ids[1:], found[1:], strict=True)]
        return np.array(chosen, np.float32)

    async def check_generation(self) -> None:
        """Raises ConfigError: it does not generate from tokens, or not with our key."""
        path = "/inference/v1/generate"
        try:
            answer = await self._client.post(path, json={})
        except httpx.HTTPError as error:
            raise self._gone(error) from error
        if answer.status_code not in (400, 422):  # an empty request is refused for what it is
            self._refuse(answer, path)

    async def abort(self, name: str) -> None:
        """Whoever streams it gets a last chunk, with the finish reason `abort`."""
        await self.post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{name}"]})

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self,
        kind: str,
        path: str,
        body: dict[str, Any] | None = None,
        parameters: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            answer = await self._client.request(kind, path, json=body, params=parameters, timeout=timeout)
            if answer.status_code != httpx.codes.OK:
                self._refuse(answer, path)
            return answer.json() if answer.content else None
        except (httpx.HTTPError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._gone(error) from error

    def _part(self, answer: Any, name: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise ServerGoneError(f"{self.url} gave no answer of vLLM, one without {name!r}: {answer!s:.200}")
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
            raise ConfigError(f"{said}. {START_IT}")
        if answer.status_code >= BROKEN:
            raise ServerGoneError(said)
        raise GenerationError(said)

    def _gone(self, error: Exception) -> ServerGoneError:
        return ServerGoneError(f"{self.url} gave no answer ({type(error).__name__}: {error})")


START_IT = (
    "Start it as docs/servers.md says: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out "
    '--logprobs-mode processed_logprobs --weight-transfer-config \'{"backend": "asyncrl"}\' '
    "--worker-extension-cls asyncrl.engines.vllm.plugin.WorkerExtension"
)
