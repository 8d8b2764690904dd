"""Engine interface: tokens in, tokens out. `vllm`, `transformers` and `fake` implement it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Completion, SamplingParams

if TYPE_CHECKING:  # the fake engine needs no torch
    from asyncrl.weights.broadcast.staging import Receiver


TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Sample `n` completions of one prompt."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    """[P]"""
    n: int
    sampling: SamplingParams
    seed: int
    text_of: TextOf | None = None
    """Decodes sampled ids, special tokens included; required with `sampling.stop`, since engines do not handle text."""


class Sampler(Protocol):
    """The part of an engine that an episode needs."""

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return `n` completions. Cancelling the task frees their slots.

        Raises:
            ContextFullError: the prompt leaves less room than the engine needs for a completion.
            GenerationError: the engine is closed or failed, or the request can never fit it.
        """
        ...


class Engine(Sampler, Protocol):
    @property
    def policy_version(self) -> int:
        """Version being served; NO_VERSION before the first load."""
        ...

    def load_weights(self, policy_version: int, tensors: Mapping[str, Any]) -> None:
        """Swap in all tensors (HF parameter names) between two decode steps of whatever is running. Any thread; blocks
        until the new version is served. All or nothing: an unknown name, shape or dtype changes no weight.

        Raises:
            WeightsError: names, shapes or dtypes do not fit; the message names the first offender.
        """
        ...

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """[T] token ids -> [T - 1] log-probs of tokens 1.., teacher-forced at temperature 1, under the served version.
        Any thread; blocks.

        Raises:
            GenerationError: the engine is closed or failed, or a sequence can never fit it.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Counters since start: `generated_tokens`, `decode_steps`, `running`, `waiting`, `load_s`..."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class OwnProcesses(Protocol):
    """An engine whose model runs in separate processes, which receive broadcast weights directly."""

    def receiver(self) -> Receiver: ...


@runtime_checkable
class Several(Protocol):
    """An engine of several replicas, each with its own weights."""

    def score_everywhere(self, sequences: Sequence[NDArray[np.int32]]) -> list[list[NDArray[np.float32]]]:
        """`Engine.score` of each replica in use."""
        ...
