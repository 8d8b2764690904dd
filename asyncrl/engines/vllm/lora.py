"""vLLM with LoRA: the base weights stay unchanged, and every version is an adapter beside those still in use.

    generate   a sequence uses the newest adapter when it starts, and finishes under it: one version from end to end
    load       staged already -> unused adapters are dropped -> the new one is added, between two steps, no pause

There is a slot for each version that may still be trained on. A sequence that has not finished when its slot is needed
is entirely too old, and starts again under the newest version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform

from asyncrl.checks.permanent import is_permanent
from asyncrl.engines.lora import AdapterTable
from asyncrl.engines.vllm.adapter_book import AdapterBook, HeldAdapter
from asyncrl.engines.vllm.engine import VllmEngine
from asyncrl.engines.vllm.requests import completion_of, sampling_of
from asyncrl.engines.vllm.settings import engine_args, read_model_config, set_environment
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import ConfigError, ModelMismatchError, NoProgress, WeightsError
from asyncrl.schema import Config
from asyncrl.types import NO_VERSION, Completion
from asyncrl.weights.adapter import target_layers

POLL_S = 0.005
NO_PATH = "in-memory"
"""vLLM requires a path; it is never opened, since the adapter is loaded already."""


def make_vllm_engine(config: Config) -> VllmLoraEngine:
    """Raises ConfigError if vLLM, the device or the model does not support the config."""
    set_environment(config.engine.tensor_parallel)
    model = read_model_config(config.model.path)
    args = engine_args(config)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(model)
    check_experts(shape, config.model.path)
    layers = target_layers(shape, config.model.lora_targets)
    # Otherwise vLLM makes slots for the head too, as large as the vocabulary, and dies at the first prompt it scores.
    args.lora_target_modules = sorted({layer.rpartition(".")[2] for layer in layers})
    return VllmLoraEngine(args, model, timeout_s=config.weights.timeout_s)


def check_experts(model: torch.nn.Module, path: str) -> None:
    """Refuse a mixture of experts on a CPU: with slots for adapters vLLM computes experts in Triton, adapted or not,
    and on a CPU its process dies at the first prompt."""
    if current_platform.is_cpu() and any(name.endswith(".experts") for name, _ in model.named_modules()):
        raise ConfigError(
            f"model.path={path} is a mixture of experts: with model.lora_rank above 0 vLLM needs Triton for it, and "
            "Triton needs a GPU. Use engine=transformers, or model.lora_rank=0"
        )


class VllmLoraEngine(VllmEngine):
    """Implements `engines.base.Engine` and `engines.base.OwnProcesses`; updates are adapters (`weights.adapter`)."""

    table = AdapterTable

    def __init__(self, args: AsyncEngineArgs, model: PreTrainedConfig, *, timeout_s: float = 60.0) -> None:
        self._book = AdapterBook(args.max_loras)
        self._running: dict[str, tuple[Sibling, HeldAdapter | None]] = {}
        """Request id -> sibling that is with vLLM, and its adapter."""
        super().__init__(args, model, timeout_s=timeout_s)

    async def _score(
        self, sequences: Sequence[NDArray[np.int32]], adapter: LoRARequest | None = None
    ) -> list[NDArray[np.float32]]:
        newest = self._book.acquire()
        try:
            return await super()._score(sequences, _request_of(newest))
        finally:
            self._book.release(newest)

    def stats(self) -> dict[str, float]:
        return super().stats() | {"adapters": float(self._book.held)}

    async def _sample(self, sibling: Sibling) -> Completion:
        """waits for: a slot, then its last token; starts again when its adapter's slot is needed."""
        while True:
            await self._queue.enter(sibling.ticket)
            adapter = self._book.acquire()
            try:
                output = await self._run_under(sibling, adapter)
            finally:
                self._book.release(adapter)
                self._queue.leave()
            if output is not None:
                completion = completion_of(sibling, output.outputs[0])
                versions = np.full_like(completion.policy_versions, adapter.policy_version) if adapter else None
                return completion if versions is None else replace(completion, policy_versions=versions)
            self._counts["restarted"] += 1

    async def _run_under(self, sibling: Sibling, adapter: HeldAdapter | None) -> RequestOutput | None:
        """Return the finished sequence; None if it was overtaken."""
        name = f"{sibling.request.request_id}.{sibling.member}.{next(self._numbers)}"
        prompt = {"prompt_token_ids": sibling.request.prompt_ids.tolist()}
        sibling.begin()
        self._running[name] = sibling, adapter
        last: RequestOutput | None = None
        try:
            async for output in self._client.stream(prompt, sampling_of(sibling), name, _request_of(adapter)):
                last = output
                if sibling.ends_now(output.outputs[0].token_ids) and not output.finished:
                    await self._client.abort([name])
        finally:
            del self._running[name]
        return None if sibling.overtaken else last

    async def _commit(self, policy_version: int) -> None:
        started = time.monotonic()
        self._queue.close()  # no sequence starts under a version that is about to be replaced
        try:
            async with self._answering(policy_version):
                await self._make_room(policy_version)
                await self._add(self._book.announce(policy_version))
            self._policy_version = policy_version
        finally:
            self._queue.open()
            self._seconds["stall_s"] += time.monotonic() - started

    async def _add(self, adapter: HeldAdapter) -> None:
        """Load an adapter in all workers. Raises WeightsError if one cannot: then none keeps it.
        ModelMismatchError: of the first adapter, for a reason that every other has, too."""
        answers = await self._client.call_workers("asyncrl_add_adapter", (adapter.number,))
        errors = [error for error in answers if error]
        if errors:
            await self._client.call_workers("asyncrl_drop_adapters", ([adapter.number],))
            said = f"version {adapter.policy_version} could not be loaded: {errors[0]}"
            kind, _, message = errors[0].partition(": ")
            if self._policy_version == NO_VERSION and is_permanent(kind, message):
                raise ModelMismatchError(f"{said}. vLLM's class of this model does not take the learner's adapter")
            raise WeightsError(said)
        self._book.commit(adapter)

    async def _make_room(self, policy_version: int) -> None:
        """waits for: sequences under the oldest adapter, which are aborted first; unblocked by: their end.

        Raises:
            NoProgress: vLLM did not end them.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            gone = self._book.evict()
            if gone:
                await self._client.call_workers("asyncrl_drop_adapters", (gone,))
            oldest = self._book.in_the_way()
            if oldest is None:
                return
            await self._take_back(oldest)
            if time.monotonic() > deadline:
                raise NoProgress(
                    f"version {policy_version} has no free slot: vLLM did not abort the requests of version "
                    f"{oldest.policy_version} within {self._timeout_s:g} s"
                )
            await asyncio.sleep(POLL_S)

    async def _take_back(self, adapter: HeldAdapter) -> None:
        names = [name for name, (sibling, held) in self._running.items() if held is adapter and not sibling.overtaken]
        for name in names:
            self._running[name][0].overtaken = True
        if names:
            await self._client.abort(names)


def _request_of(adapter: HeldAdapter | None) -> LoRARequest | None:
    return None if adapter is None else LoRARequest(adapter.name, adapter.number, NO_PATH)
