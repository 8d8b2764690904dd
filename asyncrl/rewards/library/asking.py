"""Sends requests to a server over HTTP, with retries where they may help, and a failure with its reason otherwise."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import httpx

from asyncrl.errors import ConfigError, RewardError

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 30.0


class Asking:
    """`await post(body)` returns the server's JSON answer.

    Args:
        key_env: environment variable with the key that is sent as a bearer token; empty for none. Keys are never
            settings.
        retries: further tries after one that did not get through, or that the server asks to repeat.
        backoff_s: seconds before the first retry; each further one waits twice as long, plus a random time of up to the
            same length.

    Raises:
        ConfigError: `url` is not a URL, or `key_env` is not set.
    """

    def __init__(self, url: str, *, who: str, key_env: str, request_timeout_s: float, retries: int, backoff_s: float):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{who}: url must begin with http:// or https://; got {url!r}")
        if key_env and not os.environ.get(key_env):
            raise ConfigError(f"{who}: key_env={key_env} names an environment variable that is not set. Export it")
        self._headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}
        self.url, self._who = url, who
        self._timeout_s, self._retries, self._backoff_s = request_timeout_s, retries, backoff_s
        self._client: httpx.AsyncClient | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """Send a request. Raises RewardError: refused, or not answered after all tries."""
        if self._client is None:  # made on use: it belongs to the event loop
            # Waiting for a connection behind sibling requests is not the server's silence: they have deadlines.
            self._client = httpx.AsyncClient(headers=self._headers, timeout=httpx.Timeout(self._timeout_s, pool=None))
        last = ""
        for again in range(self._retries + 1):
            wait_s = 0.0
            try:
                answer = await self._client.post(self.url, json=body)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return self._read(answer)
                last = f"status {answer.status_code}: {answer.text:.200}"
                if answer.status_code not in AGAIN:
                    raise RewardError(f"the {self._who} at {self.url} refused: {last}", "lost")
                asked = answer.headers.get("retry-after", "")
                wait_s = float(asked) if asked.isdigit() else 0.0
            if again < self._retries:
                pause_s = self._backoff_s * 2**again * (1 + random.random())
                await asyncio.sleep(min(max(pause_s, wait_s), LONGEST_PAUSE_S))
        raise RewardError(f"the {self._who} at {self.url} gave no answer in {self._retries + 1} tries: {last}", "lost")

    async def close(self) -> None:
        """Close its connections; the next `post` opens others."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _read(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"the answer of the {self._who} at {self.url} is not JSON: {answer.text:.200}", "no_number"
            ) from error
