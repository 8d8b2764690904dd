"""AsyncLLM with our errors. Everything here runs on the engine's own loop."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from asyncrl.checks.permanent import is_permanent, raised_in
from asyncrl.engines.vllm.requests import scores_of, scoring
from asyncrl.engines.vllm.stats import EngineMeter, MeterLogger
from asyncrl.errors import ConfigError, EngineDiedError, GenerationError

T = TypeVar("T")
CORE_FAILED = "ngine core initialization failed"
"""Of the error that vLLM raises here for any error in its processes."""
LOOK_S = 0.2
"""Seconds between two checks that the processes that owe an answer are alive."""


class VllmClient:
    def __init__(self, args: AsyncEngineArgs, meter: EngineMeter) -> None:
        """Start vLLM's processes; blocks until they are ready.

        Raises:
            ConfigError: vLLM refuses its arguments, or cannot serve the model with them.
            EngineDiedError: its processes did not come up.
        """
        # A factory, which vLLM calls with its config and the index of the engine.
        logger: Any = partial(MeterLogger, meter)
        log = _OwnLog()
        try:
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[logger])
        except ValueError as error:
            raise ConfigError(f"vLLM refuses its arguments: {error}. See the settings under engine") from error
        except RuntimeError as error:
            kind, message = raised_in(log.since(), besides=CORE_FAILED)
            if is_permanent(kind, message):
                raise ConfigError(
                    f"vLLM cannot serve this model with these settings: {kind}: {message}. See the settings under "
                    "engine, or use engine=transformers"
                ) from error
            reason = f"{kind}: {message}. More" if kind else "Its own reason"
            raise EngineDiedError(
                f"vLLM did not start: {error} {reason} is above. If it ran out of memory, lower "
                "engine.kv_cache_mb, engine.max_model_len or engine.vllm.gpu_memory_utilization, or raise "
                "engine.tensor_parallel. If the cache is too small for one sequence, raise engine.kv_cache_mb, or "
                "lower engine.max_model_len"
            ) from error

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose KV fits the cache."""
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)

    @property
    def max_length(self) -> int:
        return int(self._llm.model_config.max_model_len)

    async def stream(
        self, prompt: Any, sampling: VllmSampling, name: str, adapter: LoRARequest | None = None
    ) -> AsyncIterator[RequestOutput]:
        try:
            with _death_is_ours(f"request {name!r}"):
                async for output in self._llm.generate(prompt, sampling, name, lora_request=adapter):
                    yield output
        except (VLLMError, EngineGenerateError, ValueError) as error:
            raise GenerationError(f"request {name!r} failed in vLLM: {error}") from error

    async def score(self, ids: NDArray[np.int32], name: str, adapter: LoRARequest | None = None) -> NDArray[np.float32]:
        """[T] -> [T - 1]; see `Engine.score`."""
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        prompt = {"prompt_token_ids": ids.tolist()}
        outputs = [output async for output in self.stream(prompt, scoring(), name, adapter)]
        if not outputs:
            raise GenerationError(f"vLLM ended scoring request {name!r} without an answer")
        return scores_of(outputs[-1], len(ids))

    async def abort(self, names: list[str]) -> None:
        """Abort requests; their streams get a last output, with the finish reason `abort`."""
        await self._answer("abort", self._llm.abort(names))

    async def pause(self, clear_cache: bool) -> None:
        """Pause running sequences between two steps; `clear_cache` drops their KV cache and the prefix cache."""
        # As pause_generation(), without its fixed sleep of 20 ms, which would be most of the pause.
        await self._answer("pause", self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self, version_label: str) -> None:
        """Resume; tokens carry this label from now on."""
        await self._answer("resume", self._llm.update_weight_version(version_label))
        await self._answer("resume", self._llm.resume_generation())

    async def call_workers(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        return await self._answer(method, self._llm.collective_rpc(method, args=arguments))

    async def _answer(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        """waits for: vLLM's processes; unblocked by: their answer, or their death, which vLLM reports to streams but
        not to calls. The caller has the deadline.

        Raises:
            EngineDiedError: they are gone.
        """
        answer = asyncio.ensure_future(call)
        try:
            with _death_is_ours(what):
                while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                    if self._llm.errored:
                        raise EngineDeadError
                return answer.result()
        finally:
            answer.cancel()

    async def shut_down(self) -> None:
        self._llm.shutdown(timeout=5.0)


class _OwnLog:
    """What this process and its children write to standard error from now on, if that is a file."""

    def __init__(self) -> None:
        state = os.fstat(2)
        self._start = state.st_size if stat.S_ISREG(state.st_mode) else -1

    def since(self) -> str:
        if self._start < 0:
            return ""
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")


@contextmanager
def _death_is_ours(what: str) -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(f"vLLM's engine process is gone ({what})") from error
