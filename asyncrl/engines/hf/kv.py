"""The KV cache of the running batch: one preallocated slot per sequence, each written at its own length.

    row r:  k0 k1 ... k(length_r - 1) | garbage, masked

A sequence joins by copying its prompt's keys into a free slot, and leaves by having the last row moved onto it, so rows
`[0, rows)` are always live. Nothing is padded on the left, nothing is concatenated per step.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from asyncrl.errors import ConfigError

_MIN_COLUMNS = 64


def check_mergeable(kind: type[PreTrainedModel] | None, config: PreTrainedConfig) -> None:
    """Refuse models whose cache is not plain keys and values of full attention.

    Args:
        kind: the model's class, if known.

    Raises:
        ConfigError: names the first layer kind that cannot be merged into a running batch.
    """
    found = "recurrent state" if bool(getattr(kind, "_is_stateful", False)) else ""
    if not found:
        found = next(
            (_said(layer) for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer), ""
        )
    if found:
        raise ConfigError(
            "the built-in engine (engine=transformers) keeps the keys of every token of a sequence, but a model of "
            f"type {config.model_type!r} has {found}. Use engine=vllm, or a model in which every layer attends to all "
            "earlier tokens"
        )


def _said(layer: object) -> str:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "recurrent or convolutional layers"
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "layers with a sliding window, or that attend in chunks"
    return f"layers of its own kind ({type(layer).__name__})"


class SlotLayer(CacheLayerMixin):
    """Keys and values of one model layer, [slots, heads, columns, head_dim]; allocated at the first prefill."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.slots.capacity, key_states.shape[1], self.slots.columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One decode step: write `[R, heads, 1, head_dim]` at each row's position; return views of the columns in
        use."""
        assert self.keys is not None and self.values is not None
        rows, heads, view = *key_states.shape[:2], self.slots.step_columns
        places = self.slots.step_places(heads)
        # Indices into the flat memory: indexing by row and position takes a small model as long as its attention.
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            memory.view(-1, memory.shape[-1]).index_copy_(0, places, states.reshape(-1, states.shape[-1]))
        return self.keys[:rows, :, :view], self.values[:rows, :, :view]

    def resize(self) -> None:
        if self.keys is None or self.values is None:
            return
        keys, values = self.keys, self.values
        self.lazy_initialization(keys, values)
        self.keys[: len(keys), :, : keys.shape[2]] = keys
        self.values[: len(values), :, : values.shape[2]] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.step_columns, 0

    def get_seq_length(self) -> int:
        return self.slots.step_columns - 1

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """`past_key_values` of every decode step. `begin_step` sets where the step writes; HF layers call `update`."""

    def __init__(self, num_layers: int, max_sequences: int, device: torch.device) -> None:
        self.device = device
        self.max_sequences = max_sequences
        self.capacity = min(16, max_sequences)
        self.columns = _MIN_COLUMNS
        self.step_columns = 1
        self._step_positions = torch.zeros(0, dtype=torch.int64, device=device)
        self._step_places: dict[int, torch.Tensor] = {}
        self.ages = torch.arange(self.columns, device=device)
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of `columns` tokens; doubles, so that growing stays rare."""
        if rows <= self.capacity and columns <= self.columns:
            return
        while self.capacity < rows:
            self.capacity = min(2 * self.capacity, self.max_sequences)
        while self.columns < columns:
            self.columns *= 2
        self.ages = torch.arange(self.columns, device=self.device)
        for layer in self.slot_layers:
            layer.resize()

    def fill(self, prompts: DynamicCache, source: torch.Tensor, first_row: int) -> None:
        """Copy prefilled prompts into rows `first_row...`: row `first_row + i` gets prompt `source[i]` (siblings share
        one). Columns beyond a prompt's own length hold garbage from padding; the mask of every step hides them."""
        for layer, filled in zip(self.slot_layers, prompts.layers, strict=True):
            assert isinstance(filled, DynamicLayer) and filled.keys is not None and filled.values is not None
            if layer.keys is None or layer.values is None:
                layer.lazy_initialization(filled.keys, filled.values)
            assert layer.keys is not None and layer.values is not None
            rows, width = len(source), filled.keys.shape[2]
            for memory, prompt in ((layer.keys, filled.keys), (layer.values, filled.values)):
                memory[first_row : first_row + rows, :, :width].copy_(prompt.index_select(0, source))

    def move(self, source: torch.Tensor, target: torch.Tensor, columns: int) -> None:
        """Copy rows `source` over rows `target` (finished ones), up to `columns` tokens."""
        for layer in self.slot_layers:
            assert layer.keys is not None and layer.values is not None
            for memory in (layer.keys, layer.values):
                used = memory[:, :, :columns]
                used.index_copy_(0, target, used.index_select(0, source))

    def begin_step(self, positions: torch.Tensor, columns: int) -> torch.Tensor:
        """Set that rows `[0, len(positions))` write at `positions`; returns their attention mask [R, 1, 1, columns],
        bool."""
        self._step_positions = positions
        self._step_places.clear()
        self.step_columns = columns
        return (self.ages[:columns] <= positions.unsqueeze(1))[:, None, None, :]

    def step_places(self, heads: int) -> torch.Tensor:
        """[R * heads] where each row writes, as indices into the flat [slots * heads * columns]; shared by layers with
        the same number of heads."""
        places = self._step_places.get(heads)
        if places is None:
            lines = torch.arange(len(self._step_positions) * heads, device=self.device).view(-1, heads)
            places = (lines * self.columns + self._step_positions.unsqueeze(1)).view(-1)
            self._step_places[heads] = places
        return places
