"""vLLM as the engine: AsyncLLM on its own event loop in this process, its workers in their own processes.

    generate   every sibling is a separate request; they share the prompt's KV through the prefix cache
    load       staged already -> pause (keep) -> start, load, finish -> label -> resume

A sequence that spans an update carries two versions. A sequence without a token when the weights change starts again
under the new version's cache salt, so no sequence starts on another version's KV cache.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput

from asyncrl.checks.permanent import is_permanent
from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.lora import AdapterTable
from asyncrl.engines.parameters import ParameterTable
from asyncrl.engines.request_check import check_request
from asyncrl.engines.vllm.admission import AdmissionQueue, AdmissionWindow
from asyncrl.engines.vllm.client import VllmClient
from asyncrl.engines.vllm.names import load_staged
from asyncrl.engines.vllm.receiver import StagedInWorkers, VllmReceiver
from asyncrl.engines.vllm.requests import completion_of, sampling_of
from asyncrl.engines.vllm.settings import engine_args, read_model_config, set_environment
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.engines.vllm.sockets import memory_in, sockets_in
from asyncrl.engines.vllm.stats import EngineMeter
from asyncrl.errors import EngineDiedError, GenerationError, ModelMismatchError
from asyncrl.loops import LoopThread, together
from asyncrl.schema import Config
from asyncrl.spans import moment
from asyncrl.types import NO_VERSION, Completion

log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
SHUT_DOWN_S = 60.0


def make_vllm_engine(config: Config) -> VllmEngine:
    """Raises ConfigError if vLLM, the device or the model does not support the config."""
    set_environment(config.engine.tensor_parallel)
    model = read_model_config(config.model.path)
    return VllmEngine(
        engine_args(config),
        model,
        recompute=config.weights.on_update == "recompute",
        timeout_s=config.weights.timeout_s,
    )


class VllmEngine:
    """Implements `engines.base.Engine` and `engines.base.OwnProcesses`.

    Args:
        model: config of the model in `args`; incoming weights are checked against it.
        recompute: drop the KV cache at an update, and recompute that of running sequences with the new weights.
        timeout_s: longest that vLLM's processes may take for one call, including a load.
    """

    table: type[ParameterTable] | type[AdapterTable] = ParameterTable
    """Table that incoming tensors are checked against."""

    def __init__(
        self,
        args: AsyncEngineArgs,
        model: PreTrainedConfig,
        *,
        recompute: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self._recompute, self._timeout_s = recompute, timeout_s
        self._vocabulary = int(model.vocab_size)
        with torch.device("meta"):
            self._parameters = self.table(AutoModelForCausalLM.from_config(model))
        self._policy_version = self._sampled_version = NO_VERSION
        """Versions of the served weights, and of the newest token seen."""
        self._width = args.tensor_parallel_size
        self._numbers = itertools.count()
        self._tokenless: dict[str, Sibling] = {}
        """Request id -> sibling that is with vLLM and has no token yet."""
        self._counts = dict.fromkeys(("requests", "cancelled", "loads", "restarted"), 0)
        self._seconds = {"load_s": 0.0, "stall_s": 0.0}
        self._closed = False
        self._queue = AdmissionQueue(AdmissionWindow(args.max_num_seqs or 256))
        self._meter = EngineMeter(self._after_step)
        self._loop = LoopThread("vllm")

        async def start() -> VllmClient:
            return VllmClient(args, self._meter)

        self._left = ExitStack()
        with sockets_in(self._left), memory_in(self._left):
            self._client = self._loop.begin(start(), START_TIMEOUT_S)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        return self._client.max_length

    def receiver(self) -> VllmReceiver:
        return VllmReceiver(self.call_workers, self._width, self._parts())

    def _parts(self) -> Mapping[str, torch.Tensor]:
        """Tensors of which its processes need only parts."""
        if self._width > 1 and isinstance(self._parameters, ParameterTable):
            return self._parameters.outlines()
        return {}

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self._closed:
            raise GenerationError("the engine is closed; make a new one")
        longer = ", or raise engine.max_model_len or engine.kv_cache_mb"
        check_request(request, self._vocabulary, self.max_length, or_else=longer)
        return await asyncio.wrap_future(self._loop.submit(self._generate(request)))

    def load_weights(self, policy_version: int, tensors: Mapping[str, torch.Tensor] | StagedInWorkers) -> None:
        started = time.monotonic()
        if isinstance(tensors, StagedInWorkers):
            self._parameters.check(tensors.shapes)
        else:
            self._parameters.check(tensors)
            self.receiver().stage(tensors, self._timeout_s)
        self._loop.call(self._commit(policy_version), 4 * self._timeout_s)
        self._counts["loads"] += 1
        self._seconds["load_s"] += time.monotonic() - started

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """[T] token ids -> [T - 1] log-probs of tokens 1.., teacher-forced at temperature 1, under the served version.

        Raises:
            GenerationError: a sequence does not fit the engine.
        """
        return self._loop.call(self._score(sequences), 10 * self._timeout_s)

    async def _score(
        self, sequences: Sequence[NDArray[np.int32]], adapter: LoRARequest | None = None
    ) -> list[NDArray[np.float32]]:
        names = [f"score.{next(self._numbers)}" for _ in sequences]
        return list(await asyncio.gather(*map(self._client.score, sequences, names, [adapter] * len(names))))

    def stats(self) -> dict[str, float]:
        meter, queue = self._meter, self._queue
        return {
            "generated_tokens": float(meter.generated_tokens),
            "prefill_tokens": float(meter.prefill_tokens),
            "cached_tokens": float(meter.cached_tokens),
            **meter.decoded.named("decode"),
            **meter.prefilled.named("prefill"),
            "running": float(queue.in_flight),
            "waiting": float(queue.waiting),
            "kv_usage": meter.usage,
            "preemptions": float(meter.preemptions),
            "admission_window": float(queue.window.limit),
            **{name: float(count) for name, count in self._counts.items()},
            **self._seconds,
        }

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._close)

    def call_workers(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> list[Any]:
        """Call one method of `plugin.WorkerExtension` in every worker process; from any thread but the engine's.

        Raises:
            EngineDiedError: the processes are gone, or do not answer.
        """
        return self._loop.call(self._client.call_workers(method, arguments), timeout_s or self._timeout_s)

    def _close(self) -> None:
        try:
            self._loop.call(self._client.shut_down(), SHUT_DOWN_S)
        # Any error that vLLM raises when its processes are gone already: the caller is often ending with the error that
        # they died of, which must stay visible.
        except Exception as error:
            log.warning("vLLM did not shut down cleanly: %s: %s", type(error).__name__, error)
        finally:
            self._loop.close()
            self._left.close()

    def _after_step(self) -> None:
        self._queue.window.observe(self._queue.in_flight, self._meter.usage, self._meter.preemptions)
        self._queue.admit()

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        if not self._counts["requests"]:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            self._queue.window.begin(self._client.kv_tokens, longest)
        self._counts["requests"] += 1
        siblings = [Sibling(request, member, next(self._numbers)) for member in range(request.n)]
        tasks = [asyncio.create_task(self._sample(sibling)) for sibling in siblings]
        try:
            return await together(*tasks)
        finally:
            self._counts["cancelled"] += sum(task.cancelled() for task in tasks)

    async def _sample(self, sibling: Sibling) -> Completion:
        """waits for: a slot, then its last token; starts again each time weights overtake its first token."""
        while True:
            await self._queue.enter(sibling.ticket)
            try:
                output = await self._run(sibling)
            finally:
                self._queue.leave()
            if output is not None:
                return completion_of(sibling, output.outputs[0])
            self._counts["restarted"] += 1

    async def _run(self, sibling: Sibling) -> RequestOutput | None:
        """Return the finished sequence; None if it was overtaken."""
        name = f"{sibling.request.request_id}.{sibling.member}.{next(self._numbers)}"
        prompt = {"prompt_token_ids": sibling.request.prompt_ids.tolist(), "cache_salt": f"v{self._policy_version}"}
        sibling.begin()
        self._tokenless[name] = sibling
        last: RequestOutput | None = None
        try:
            async for output in self._client.stream(prompt, sampling_of(sibling), name):
                last = output
                self._tokenless.pop(name, None)
                self._note_first(output.outputs[0])
                if sibling.overtaken:
                    return None
                if sibling.ends_now(output.outputs[0].token_ids) and not output.finished:
                    await self._client.abort([name])
        finally:
            self._tokenless.pop(name, None)
        return last

    def _note_first(self, output: CompletionOutput) -> None:
        """Record the first token of each version. Outputs arrive at the first token of a sequence and at its end."""
        label = str(self._policy_version)
        if self._sampled_version != self._policy_version and any(
            span.version == label for span in output.weight_versions or []
        ):
            self._sampled_version = self._policy_version
            moment("first token", version=self._policy_version)

    async def _commit(self, policy_version: int) -> None:
        """Pause once, in which the staged weights become this version."""
        self._queue.close()
        started = time.monotonic()
        try:
            async with self._answering(policy_version):
                await self._client.pause(clear_cache=self._recompute)
                await self._overtake()
                await self._load_staged(policy_version)
                self._policy_version = policy_version
                await self._client.resume(str(policy_version))
        finally:
            self._meter.stood_still = True
            self._queue.open()
            self._seconds["stall_s"] += time.monotonic() - started

    @asynccontextmanager
    async def _answering(self, policy_version: int) -> AsyncIterator[None]:
        """Raises EngineDiedError if vLLM's processes do not answer the calls inside, made for a load."""
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                yield
        except TimeoutError:
            raise EngineDiedError(
                f"version {policy_version} was not loaded: vLLM's processes gave no answer for "
                f"{2 * self._timeout_s:g} s (twice weights.timeout_s)"
            ) from None

    async def _overtake(self) -> None:
        """Take back sequences without a token: after the load they might start on KV cache of the old version."""
        for sibling in self._tokenless.values():
            sibling.overtaken = True
        if self._tokenless:
            await self._client.abort(list(self._tokenless))

    async def _load_staged(self, policy_version: int) -> None:
        why = await load_staged(self._client.call_workers)
        if not why:
            return
        kind, _, message = why.partition(": ")
        # Later loads have the same names and shapes: what they fail for is of the moment.
        if self._policy_version == NO_VERSION and is_permanent(kind, message):
            raise ModelMismatchError(
                f"version {policy_version} does not fit vLLM's class of this model: {why}. vLLM and transformers build "
                "it with different parameters from its config.json. Use engine=transformers, a config.json for which "
                "both agree, or another version of vLLM"
            )
        raise EngineDiedError(
            f"version {policy_version} could not be loaded, and the engine's weights are now mixed: {why}"
        )
