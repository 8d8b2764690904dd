"""An engine that costs its process next to nothing. It sleeps for every token, and its replies are pieces of a text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from asyncrl.engines.base import GenerateRequest
from asyncrl.types import Completion


class PacedEngine:
    """Implements `engines.base.Sampler`. Every reply ends with `end`.

    Args:
        text: token ids of a text, of which replies are pieces.
        end: token id that ends a reply.
        tokens: mean number of tokens of a reply.
        token_s: seconds per token of one sequence.
    """

    max_length = 1 << 16

    def __init__(self, text: Sequence[int], end: int, *, tokens: int, token_s: float) -> None:
        self._text, self._end, self._tokens, self._token_s = np.asarray(text, np.int32), end, tokens, token_s
        self._random = random.Random(0)
        self.generated = 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        return list(await asyncio.gather(*(self._one(request) for _ in range(request.n))))

    async def _one(self, request: GenerateRequest) -> Completion:
        most = request.sampling.max_new_tokens
        count = min(most, self._random.randint(self._tokens // 2, self._tokens * 3 // 2))
        await asyncio.sleep(count * self._token_s)
        self.generated += count
        start = self._random.randrange(len(self._text) - count)
        ids = self._text[start : start + count].copy()
        ids[-1] = self._end
        return Completion(
            token_ids=ids,
            logprobs=np.full(count, -0.5, np.float32),
            policy_versions=np.zeros(count, np.int32),
            finish_reason="stop",
        )
