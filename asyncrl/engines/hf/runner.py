"""The model side of the engine: load, prefill, decode step. Everything here runs on the engine thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from asyncrl.checks.loaded_weights import refuse_unequal
from asyncrl.engines.hf.kv import SlotCache, check_mergeable
from asyncrl.engines.hf.sampling import at_temperature, sample
from asyncrl.engines.hf.truncation import Truncation, supports, written
from asyncrl.engines.lora import AdapterTable
from asyncrl.engines.parameters import ParameterTable
from asyncrl.errors import ConfigError
from asyncrl.fp32_head import make_head_fp32
from asyncrl.routers import Recorder
from asyncrl.types import TOPK_IDS, TOPK_LOGPROBS

_ROUND_COLUMNS = 8
_UNFIT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError)
"""Errors of a forward that was not written for our cache, mask or positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Result of sampling one step, on the host."""

    tokens: NDArray[np.int64]
    """[R]"""
    logprobs: NDArray[np.float32]
    """[R]"""
    recorded: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict)
    """By name, the piece that the step appends to `Completion.recorded` for each of the R rows."""


def _topk_pieces(logprobs: torch.Tensor, ids: torch.Tensor) -> dict[str, Sequence[NDArray[Any]]]:
    """Return a piece [1, k] for each row."""
    found = {TOPK_IDS: ids.to(torch.int32), TOPK_LOGPROBS: logprobs.float()}
    return {name: tuple(values.cpu().numpy()[:, None]) for name, values in found.items()}


class ModelRunner:
    """A Hugging Face causal LM with the KV slots of its running sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        max_sequences: int,
        *,
        adapters: bool = False,
        fp32_head: bool = False,
    ) -> None:
        check_mergeable(type(model), model.config)
        if fp32_head:
            make_head_fp32(model.get_output_embeddings())
        self.model = model.to(device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
        self.device = device
        config = model.config.get_text_config(decoder=True)
        # Models without position embeddings of their own (ALiBi) have no limit.
        self.max_length = int(getattr(config, "max_position_embeddings", None) or sys.maxsize)
        self.vocabulary = int(config.vocab_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_sequences = max_sequences
        self.slots = SlotCache(self.num_layers, max_sequences, device)
        self.parameters = AdapterTable(self.model) if adapters else ParameterTable(self.model)
        self._recorder: Recorder | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        max_sequences: int,
        *,
        adapters: bool = False,
        fp32_head: bool = False,
    ) -> ModelRunner:
        """Load from a directory or hub name; code shipped with a checkpoint is never run.

        Args:
            adapters: updates are adapters for these weights, not full weights.
            fp32_head: as `model.fp32_head`.

        Raises:
            ConfigError: the checkpoint lacks a weight, or has one too many.
        """
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        model, found = loaded
        try:
            refuse_unequal(type(model).__name__, found["missing_keys"], found["unexpected_keys"])
        except ValueError as error:
            raise ConfigError(f"model.path={path} cannot be loaded: {error}") from error
        return cls(model, device, max_sequences, adapters=adapters, fp32_head=fp32_head)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Swap in an update that has passed `parameters.check`."""
        self.parameters.load(tensors)

    def prefill(self, prompts: list[NDArray[np.int32]]) -> tuple[DynamicCache, torch.Tensor]:
        """Return the keys of all `prompts`, padded on the right, and the logits [P, V] after the last token of each.

        Right padding needs no mask: under causal attention no real token attends to what comes after it.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        ids = np.zeros((len(prompts), int(lengths.max())), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        # Only these positions go through the LM head: [P, distinct lengths, V] instead of [P, longest, V].
        ends, which = np.unique(lengths - 1, return_inverse=True)
        cache = DynamicCache(config=self.model.config)
        output = self.model(
            input_ids=self._tensor(ids), past_key_values=cache, use_cache=True, logits_to_keep=self._tensor(ends)
        )
        return cache, output.logits[self._tensor(np.arange(len(prompts))), self._tensor(which)]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits [R, V] of rows `[0, R)` after feeding [R] `tokens` at [R] `positions`."""
        longest = int(positions.max()) + 1
        columns = -(-longest // _ROUND_COLUMNS) * _ROUND_COLUMNS
        self.slots.reserve(len(tokens), columns)
        feed = self._tensor(np.stack([tokens, positions]))
        mask = self.slots.begin_step(feed[1], columns)
        output = self.model(
            input_ids=feed[0].unsqueeze(1),
            attention_mask=mask,
            position_ids=feed[1].unsqueeze(1),
            past_key_values=self.slots,
            use_cache=True,
        )
        return output.logits[:, -1]

    @contextmanager
    def routing(self, wanted: bool, rows: int) -> Iterator[list[NDArray[Any]]]:
        """Context for a `prefill` or `decode` of `rows`; afterwards the list holds the experts of each row's tokens,
        [T, layers, k]. It stays empty unless `wanted`."""
        told: list[NDArray[Any]] = []
        if not wanted:
            yield told
            return
        self._recorder = self._recorder or Recorder(self.model)
        with self._recorder.on(rows, told):
            yield told

    def sample(
        self,
        logits: torch.Tensor,
        temperature: NDArray[np.float32],
        uniform: NDArray[np.float64],
        any_greedy: bool,
        truncation: NDArray[np.float32] | None = None,
        topk: int = 0,
    ) -> Drawn:
        """Sample one token per row. The only synchronisation of a step, unless something is recorded.

        Args:
            truncation: [3, R] top-p, top-k and min-p of each row; None samples from the whole vocabulary.
            topk: number of most likely tokens to record.
        """
        heat, support = self._tensor(temperature), None
        if truncation is not None:
            top_p, top_k, min_p = self._tensor(truncation)
            given = Truncation(top_p=top_p, top_k=top_k, min_p=min_p)
            support = supports(at_temperature(logits, heat, any_greedy), given)
        tokens, logprobs, likeliest = sample(logits, heat, self._tensor(uniform), any_greedy, support, topk)
        both = torch.stack([tokens, logprobs.view(torch.int32).to(torch.int64)]).cpu().numpy()
        return Drawn(
            tokens=both[0],
            logprobs=both[1].astype(np.int32).view(np.float32),
            recorded={
                **({} if support is None else written(support)),
                **({} if likeliest is None else _topk_pieces(*likeliest)),
            },
        )

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """[T] token ids -> [T - 1] log-probs of tokens 1.. at temperature 1, by plain forwards without a cache."""
        scored = []
        for ids in sequences:
            tokens = self._tensor(ids.astype(np.int64))
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
            logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            scored.append(logprobs.cpu().numpy())
        return scored

    def check_model(self) -> None:
        """Verify that the model interprets slots, mask and positions as this engine does.

        Two prompts of different lengths are decoded one token in a merged batch and compared with plain forwards. An
        architecture that derives positions from something else (ALiBi from a 2D mask, say) fails here, at the start.

        Raises:
            ConfigError: the logits differ, or the model does not accept such a batch.
        """
        prompts = [np.arange(1, 3, dtype=np.int32) % self.vocabulary, np.arange(2, 7, dtype=np.int32) % self.vocabulary]
        try:
            cache, _ = self.prefill(prompts)
            self.slots.reserve(2, 8)
            self.slots.fill(cache, self._tensor(np.array([0, 1])), 0)
            ours = self.decode(np.array([1, 1]), np.array([2, 5])).float()
        except _UNFIT as error:
            raise ConfigError(
                f"model type {self.model.config.model_type!r} cannot be batched by the built-in engine "
                f"(engine=transformers): a merged batch fails in it ({error!r}). Use engine=vllm, or another model"
            ) from error
        plain = [self.model(input_ids=self._tensor(np.append(p, 1)[None])).logits[0, -1] for p in prompts]
        theirs = torch.stack(plain).float()
        worst, scale = float((ours - theirs).abs().max()), float(theirs.abs().max()) + 1.0
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        if not worst <= tolerance * scale:
            raise ConfigError(
                f"model type {self.model.config.model_type!r} cannot be batched by the built-in engine "
                f"(engine=transformers): its logits in a merged batch differ by {worst:.3g} from a plain forward. Use "
                "engine=vllm, or another model"
            )

    def _tensor(self, array: NDArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
