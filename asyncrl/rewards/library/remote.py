"""`remote`: scores with a service of yours, which gets a completion with its row and returns a number."""

from __future__ import annotations

from typing import Any

from asyncrl.rewards.library.asking import Asking


class Remote:
    """Score from the server's answer to `POST {"completion": ..., "row": {...}}`: a number, or a mapping with `score`
    whose other numbers are parts.

    Raises:
        ConfigError: an invalid argument. When called, RewardError: refused, or no answer after all tries.
    """

    def __init__(
        self,
        url: str,
        key_env: str = "",
        request_timeout_s: float = 30.0,
        retries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        self._asking = Asking(
            url,
            who="reward server",
            key_env=key_env,
            request_timeout_s=request_timeout_s,
            retries=retries,
            backoff_s=backoff_s,
        )

    async def __call__(self, completion: str, row: dict[str, Any]) -> Any:
        return await self._asking.post({"completion": completion, "row": row})
