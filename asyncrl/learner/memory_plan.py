"""Estimates the memory that a rank will use, in bytes, from shapes alone; `--dry-run` and the learner both use it. No
torch.

FSDP2 splits every parameter along its first dimension into as many equal chunks as there are ranks, the last ones
shorter or empty; every rank allocates the size of the first. Each function says what is exact and what is estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.checks.architecture import BLOCK, BY_COLUMNS, FUSED, SPLIT_LAYERS, of_its_decoder

MASTER = 4
"""Bytes per element of a trained weight, of its gradient and usually of each of AdamW's two moments."""
ROOM = 0.5
"""Fraction of a rank's memory that may be planned for one kind of tensors: shards and gradients, or scores."""
STEP_COUNT = 4
"""Bytes of AdamW's step count, per parameter tensor."""
HEAD_ELEMENTS = 1 << 19
"""fp32 logits in one chunk of the head (`model.logprobs`): 2 MiB, which stay in cache with a small vocabulary..."""
HEAD_MIN_ROWS = 512
"""... but a chunk has at least this many rows; with fewer the matrix products of a large vocabulary are slow."""
HEAD_GPU_ROWS, HEAD_GPU_BYTES, HEAD_GPU_STEP = 8192, 5 << 29, 256
"""Limits on a chunk of the head's backward on a GPU: the number of rows, the bytes of its fp32 logits; the row count is
a multiple of the third. Each chunk reads and writes the gradient of the head's weight in fp32, whatever its number of
rows: calculated from published memory bandwidth and matrix throughput, not measured."""
Shape = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that one model takes on a rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def share(shape: Shape, ranks: int) -> int:
    """Elements on the rank with the largest chunk."""
    return -(-shape[0] // ranks) * math.prod(shape[1:]) if len(shape) else 1


def in_eight_bits(shape: Shape) -> bool:
    """Whether `learner.optimizer=adamw_8bit` keeps the moments of a parameter in 8 bits. Norms, biases and matrices
    whose row length is not a multiple of `BLOCK` keep them in fp32."""
    return len(shape) > 1 and shape[-1] % BLOCK == 0


def moment_bytes(optimizer: str) -> float:
    """Bytes per element of AdamW's two moments together, for a parameter that is `in_eight_bits`."""
    return 2 * (1 + MASTER / BLOCK) if optimizer == "adamw_8bit" else 2 * MASTER


def held(
    shapes: Iterable[Shape], ranks: int, *, width: int = MASTER, trained: bool = True, optimizer: str = "adamw"
) -> Held:
    """Exact bytes of all parameters of one kind; `gradients` are the shards after reduction over the ranks.

    Args:
        width: bytes per weight.
        optimizer: `learner.optimizer`.
    """
    kept = list(shapes)
    numbers = sum(share(shape, ranks) for shape in kept)
    if not trained:
        return Held(weights=width * numbers, gradients=0, optimizer=0)
    moments = sum(share(shape, ranks) * moment_bytes(optimizer if in_eight_bits(shape) else "adamw") for shape in kept)
    state = int(moments) + STEP_COUNT * len(kept)
    return Held(weights=width * numbers, gradients=MASTER * numbers, optimizer=state)


def on_one_of(shapes: Mapping[str, Shape], together: int, *, computing: bool = False) -> dict[str, Shape]:
    """Shapes of the parameters on each of `together` tensor-parallel ranks, for a model that supports it
    (`checks.architecture.COMPUTED_TOGETHER`): all matrices are split, norms are not.

    Args:
        computing: shapes during the computation: embedding, head and fused layers are then whole.
    """
    cut: dict[str, Shape] = {}
    for name, shape in shapes.items():
        *_, above, layer, _ = ("", *name.split("."))
        of_adapter = layer in ("lora_A", "lora_B")
        style = SPLIT_LAYERS.get(above if of_adapter else layer, "")
        by_columns = style == BY_COLUMNS
        if of_adapter:  # one half is split like its layer, in the dimension they share
            split = (layer == "lora_A") == by_columns
        elif len(shape) == 2:
            split = not (computing and (style == FUSED or re.search(r"\.\d+\.", name) is None))
        else:
            split = len(shape) == 1 and bool(style) and not by_columns and not (computing and style == FUSED)
        if not split:
            cut[name] = shape
        elif by_columns:
            cut[name] = (shape[0], -(-shape[1] // together))
        else:
            cut[name] = (-(-shape[0] // together), *shape[1:])
    return cut


def apart(shapes: Mapping[str, Shape], ranks: int) -> dict[str, Shape]:
    """Shapes of the parameters on each of `ranks` expert-parallel ranks, before FSDP2 splits them. The size of a rank's
    shard is the same as without expert parallelism: both split stacks of experts by their number."""
    return {
        name: (shape[0] // ranks, *shape[1:]) if len(shape) == 3 and ".experts." in name else shape
        for name, shape in shapes.items()
    }


def head_rows(vocabulary: int) -> int:
    """Tokens in a chunk of logits in the forward."""
    return max(HEAD_MIN_ROWS, HEAD_ELEMENTS // vocabulary)


def head_backward_rows(vocabulary: int, device: str, *, plain: bool = True) -> int:
    """Tokens in a chunk of logits in the backward.

    Args:
        device: device type without an index, `cpu` or `cuda`.
        plain: no supports and no gradient through the entropy. Both need further memory beside the logits, so their
            chunks stay as small as in the forward.
    """
    rows = head_rows(vocabulary)
    if device == "cpu" or not plain:
        return rows
    room = HEAD_GPU_BYTES // (MASTER * vocabulary) // HEAD_GPU_STEP * HEAD_GPU_STEP
    return max(rows, min(HEAD_GPU_ROWS, room))


def head_bytes(vocabulary: int, hidden: int, width: int, device: str, scored: int, *, wide: bool = False) -> int:
    """Estimate for the head: a chunk of its logits, in fp32 twice in the forward and once in the backward, plus one
    copy in a narrower compute dtype, and the fp32 gradient of its weight, which one rank holds whole until it is
    reduced.

    Args:
        device: see `head_backward_rows`.
        scored: number of tokens that the head is applied to.
        wide: `model.fp32_head`: the weight is held in fp32 as well.
    """
    own = 0 if wide or width == MASTER else width
    chunks = (head_rows(vocabulary), 2 * MASTER + own), (head_backward_rows(vocabulary, device), MASTER + own)
    logits = max(min(rows, scored) * each for rows, each in chunks) * vocabulary
    return logits + (1 + wide) * MASTER * vocabulary * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Dimensions of a decoder, from the field names that all Hugging Face configs use."""

    layers: int
    hidden: int
    queries: int
    """Number of heads times their width."""
    keys: int
    """Number of key-value heads times their width."""
    inner: int
    """Width of the feed-forward layer; for a mixture, of all experts that a token goes through."""
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes | None:
        """Read the dimensions from a config. None if it is not the config of a plain decoder."""
        model = of_its_decoder(config)
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        if not all(isinstance(model.get(name), int) and model[name] > 0 for name in names):
            return None
        layers, hidden, heads, vocabulary = (model[name] for name in names)
        width = model.get("head_dim") or hidden // heads
        inner = model.get("intermediate_size") or 4 * hidden
        if chosen := model.get("num_experts_per_tok"):
            inner = chosen * (model.get("moe_intermediate_size") or inner) + (
                model.get("shared_expert_intermediate_size") or 0
            )
        return cls(
            layers=layers,
            hidden=hidden,
            queries=heads * width,
            keys=(model.get("num_key_value_heads") or heads) * width,
            inner=inner,
            vocabulary=vocabulary,
        )

    def on_one_of(self, together: int) -> Sizes:
        """The dimensions on each of `together` tensor-parallel ranks."""
        heads, keys, inner = (-(-size // together) for size in (self.queries, self.keys, self.inner))
        return replace(self, queries=heads, keys=keys, inner=inner)

    def layer_bytes(self, tokens: int, slots: int, width: int) -> int:
        """Estimate of what one layer keeps for its backward.

        Per token: two norms (input in fp32, normalised, weighted), the input of the attention's output projection, and
        for the feed-forward layer its gate before and after the activation, its other half and their product. Per slot
        of attention: queries, keys, values and output.

        Args:
            slots: tokens of all sequences, with a shared prompt counted once per sequence.
            width: bytes per number in the compute dtype.
        """
        of_token = 2 * self.hidden * (4 + 2 * width) + (self.queries + 4 * self.inner) * width
        return tokens * of_token + slots * 2 * (self.queries + self.keys) * width

    def kept_bytes(self, tokens: int, slots: int, width: int, keep: str) -> int:
        """Estimate of what a recomputed layer keeps.

        Args:
            keep: `model.checkpoint_keep`: beside its input the output of attention (its log-sum-exps, one number per
                head, are left out), or also the outputs of its seven matrix products.
        """
        numbers = tokens * self.hidden
        if keep != "nothing":
            numbers += slots * self.queries
        if keep == "matmul":
            numbers += tokens * (self.queries + 2 * self.keys + 2 * self.hidden + 2 * self.inner)
        return numbers * width

    def activations(self, tokens: int, slots: int, width: int, every: int = 0, keep: str = "nothing") -> int:
        """Estimate for a micro-batch: what its layers keep, plus one recomputed layer in full.

        Args:
            every: one in this many layers is recomputed; 0 for none.
            keep: see `kept_bytes`.
        """
        each = self.layer_bytes(tokens, slots, width)
        again = -(-self.layers // every) if every else 0
        return (self.layers - again + (again > 0)) * each + again * self.kept_bytes(tokens, slots, width, keep)


def stacked(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes as the model holds them: transformers keeps all experts of a layer in one tensor, stacked along dim 0."""
    experts: dict[str, list[Shape]] = {}
    whole: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if re.search(r"\.experts\.\d+\.", name):
            experts.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(shape)
        else:
            whole[name] = shape
    return whole | {name: (len(each), *each[0]) for name, each in experts.items()}


def whole_numbers(shapes: Mapping[str, Shape]) -> int:
    """Parameters that are whole on a rank at a time: those outside layers, one layer, and the prefetched next one."""
    groups: dict[str, int] = {}
    for name, shape in shapes.items():
        found = re.search(r"^.*?\.\d+\.", name)
        group = found.group() if found else ""
        groups[group] = groups.get(group, 0) + math.prod(shape)
    rest = groups.pop("", 0)
    return rest + sum(sorted(groups.values())[-2:])


def reduces_each(setting: str, *, shards: int, trained: int, memory: int) -> bool:
    """Whether gradients are reduced with every micro-batch.

    Args:
        setting: `learner.reduce_gradients`; `auto` reduces with each if the whole gradient does not fit into `memory`.
        shards: bytes that a rank holds of all models: weights, gradients, moments.
        trained: number of parameters of the largest model that is trained.
        memory: bytes of one rank.
    """
    if setting != "auto":
        return setting == "each"
    return shards + MASTER * trained > ROOM * memory
