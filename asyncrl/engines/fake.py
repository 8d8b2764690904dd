"""A deterministic engine without a model: tokens and log-probs are a pure function of what should determine them.

token = f(seed, prompt, member, position, policy_version), so a test can tell from a completion alone whether the
right weights, the right prompt and the right seed were used. Each decode step takes `latency_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.noise import mix
from asyncrl.engines.stop_text import check_stop, ended_by_text
from asyncrl.errors import GenerationError, WeightsError
from asyncrl.types import NO_VERSION, Completion


class FakeEngine:
    """Implements `engines.base.Engine` without torch.

    Args:
        vocabulary: tokens are below it; stop tokens come from the request.
        latency_s: seconds per token of every sequence.
    """

    def __init__(self, vocabulary: int = 256, latency_s: float = 0.0) -> None:
        self._vocabulary = vocabulary
        self._latency_s = latency_s
        self._policy_version = NO_VERSION
        self._closed = False
        names = ("generated_tokens", "decode_steps", "running", "loads", "load_s", "stall_s")
        self._stats = dict.fromkeys(names, 0.0)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self._stats["running"] += request.n
        try:
            return await self._run(request)
        finally:
            self._stats["running"] -= request.n

    @property
    def max_length(self) -> int:
        """Large enough that no request is refused."""
        return 1 << 20

    def load_weights(self, policy_version: int, tensors: Mapping[str, Any]) -> None:
        if self._closed:
            raise WeightsError("the engine is closed")
        self._policy_version = policy_version
        self._stats["loads"] += 1

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        version = self._policy_version
        return [
            np.array([-(mix(version, *ids[: i + 1].tolist()) % 1000 + 1) / 500 for i in range(1, len(ids))], np.float32)
            for ids in sequences
        ]

    def stats(self) -> dict[str, float]:
        return {**self._stats, "waiting": 0.0}

    async def close(self) -> None:
        self._closed = True

    async def _run(self, request: GenerateRequest) -> list[Completion]:
        rows: list[tuple[list[int], list[float], list[int]]] = [([], [], []) for _ in range(request.n)]
        check_stop(request)
        lengths = [self._length(request, member) for member in range(request.n)]
        for position in range(max(lengths)):
            await asyncio.sleep(self._latency_s)
            if self._closed:
                raise GenerationError(f"request {request.request_id!r} was not finished: the engine was closed")
            version = self._policy_version
            self._stats["decode_steps"] += 1
            for member, (tokens, logprobs, versions) in enumerate(rows):
                if position < lengths[member]:
                    last = position + 1 == lengths[member]
                    token, logprob = self.token(request, member, position, version, last=last)
                    tokens.append(token)
                    logprobs.append(logprob)
                    versions.append(version)
                    self._stats["generated_tokens"] += 1
                    if ended_by_text(request, tokens):
                        lengths[member] = position + 1
        return [_completion(request, *row) for row in rows]

    def token(
        self, request: GenerateRequest, member: int, position: int, policy_version: int, *, last: bool
    ) -> tuple[int, float]:
        """Return (token id, log-prob) that this engine samples there. The last token is the stop token, if there is
        one."""
        key = mix(request.seed, _prompt_key(request), member, position, policy_version)
        stops = request.sampling.stop_token_ids
        token = key % self._vocabulary
        if stops and last and position + 1 < request.sampling.max_new_tokens:
            token = stops[0]
        elif token in stops:
            token = next(other for other in range(self._vocabulary) if other not in stops)
        return token, float(np.float32(-((key >> 20) % 1000 + 1) / 500))

    def _length(self, request: GenerateRequest, member: int) -> int:
        limit = request.sampling.max_new_tokens
        return mix(request.seed, _prompt_key(request), member) % limit + 1 if request.sampling.stop_token_ids else limit


def _prompt_key(request: GenerateRequest) -> int:
    return mix(0, *(int(token) for token in request.prompt_ids))


def _stopped(request: GenerateRequest, tokens: list[int]) -> bool:
    return tokens[-1] in request.sampling.stop_token_ids or ended_by_text(request, tokens)


def _completion(request: GenerateRequest, tokens: list[int], logprobs: list[float], versions: list[int]) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
        policy_versions=np.array(versions, np.int32),
        finish_reason="stop" if _stopped(request, tokens) else "length",
    )
