"""HTTP API of `vllm serve` 0.32.

/inference/v1/generate           tokens in, tokens out (needs --enable-scale-out; guarded by the server's key)
/inference/v1/abort_requests     likewise
/metrics                         its gauges for Prometheus, which no key guards
/pause /resume /update_weight_version /weight_info /server_info /collective_rpc
                                 developer mode (VLLM_SERVER_DEV_MODE=1), which no key guards
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.checks.servers import ServerFacts
from asyncrl.engines.server.answers import Answer, ServerGoneError, generation_body
from asyncrl.engines.server.link import Load, ServerLink
from asyncrl.engines.server.terms import LOOK_TIMEOUT_S, START_IT, differences, facts_of, problems
from asyncrl.engines.vllm.names import load_staged
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import GenerationError

GENERATE = "/inference/v1/generate"
GAUGES = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
"""One of each per engine process; `vllm:num_requests_waiting_by_reason` repeats the second."""


class VllmLink(ServerLink):
    kind, start_it = "vLLM", START_IT
    tells_spans = True

    async def facts(self, dtype: str, shape: Mapping[str, Any] | None) -> ServerFacts:
        settings = await self.get("/server_info?config_format=json", "vllm_config")  # the first call takes seconds
        version = await self.get("/version", "version", LOOK_TIMEOUT_S)
        try:
            why, facts = next(problems(version, settings, dtype), ""), facts_of(settings)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self.unusable(
                f"its /server_info is not that of vLLM 0.32 ({type(error).__name__}: {error}). Start that version"
            ) from error
        if not why:
            await self.check_generation(GENERATE)
        if not why and shape is not None:
            why = next(differences(shape, await self.call_workers("asyncrl_model", ())), "")
        if why:
            raise self.unusable(why)
        return facts

    async def label(self, timeout_s: float) -> str:
        return str(await self.get("/weight_info", "weight_version", timeout_s))

    async def busy(self, timeout_s: float) -> float:
        lines = (await self.text("/metrics", timeout_s)).splitlines()
        try:
            return float(sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(GAUGES)))
        except (IndexError, ValueError, OverflowError) as error:
            raise GenerationError(f"{self.url} has gauges that are not vLLM's: {error}") from error

    def stream(self, sibling: Sibling, name: str, label: str) -> AsyncIterator[Mapping[str, Any]]:
        return self.chunks(GENERATE, generation_body(sibling, name, label), name)

    def read(self, chunk: Mapping[str, Any], answer: Answer) -> int:
        try:
            return answer.add(chunk)
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerGoneError(f"{self.url} sent a chunk that is not vLLM's ({error!r}): {chunk!s:.200}") from error

    async def abort(self, name: str) -> None:
        """Abort a request; its stream gets a last chunk, with the finish reason `abort`."""
        await self.post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{name}"]})

    async def score(self, ids: NDArray[np.int32], name: str) -> NDArray[np.float32]:
        """Score a sequence without reading the prefix cache, which holds no log-probs."""
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        sampling = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 0}
        sampling |= {"detokenize": False, "skip_reading_prefix_cache": True}
        body = {"request_id": name, "token_ids": ids.tolist(), "sampling_params": sampling}
        answer = await self.post(GENERATE, body)
        found = self.part(answer, "prompt_logprobs") or []
        if len(found) != len(ids):
            raise GenerationError(f"{self.url} scored {len(found) - 1} of {len(ids) - 1} tokens")
        chosen = [by_token[str(token)]["logprob"] for token, by_token in zip(ids[1:], found[1:], strict=True)]
        return np.array(chosen, np.float32)

    async def load(self, load: Load) -> None:
        await self.post("/pause", mode="keep", clear_cache=str(load.recompute).lower())
        load.overtake()
        why = await load_staged(self.call_workers)
        if why:
            raise ServerGoneError(f"{self.url} could not load {load.label} and stays paused: {why}")
        await self.post("/update_weight_version", {"new_version": load.label})
        await self.post("/resume")

    async def call_workers(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call one method of `vllm.plugin.WorkerExtension` in every worker process of the server."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        return self.part(answer, "results")
