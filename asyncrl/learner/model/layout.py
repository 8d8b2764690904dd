"""Chooses how sequences go through a model: end to end in one pack, or each in a row of its own. Tested at load.

Packing is correct if only attention moves information between tokens. Recurrent and convolutional layers, and attention
that does not go through transformers' interface, silently continue across the border between two sequences. So the
model itself is tested, in float32: plain transformers on one sequence at a time, against the same sequences run as in
training. On several ranks it is sharded by then, and all of them run the test.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from asyncrl.checks.architecture import too_long_to_guess
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model.attention import PACKED_ATTENTION, UnpackedCall
from asyncrl.learner.model.attention_kernel import uncompiled
from asyncrl.learner.model.packed import Layout, PackedModel
from asyncrl.learner.parallel.collectives import is_first, text_of_rank_zero
from asyncrl.learner.parallel.sharding import device_of
from asyncrl.weights.canary import Canary, Difference, Tolerance, compare, random_probes, tolerance

log = logging.getLogger(__name__)

PROBE_LENGTHS = (9, 14, 5)
"""Lengths of the sequences that are scored. They are short because effects across a border fade with distance."""
PROBES_IN_ROWS = 2
"""How many of them are scored if packing is ruled out: the only question left is whether padding does harm. The
reference code of recurrent layers takes seconds per layer and sequence."""
MANY = 50_000_000
"""Number of parameters from which more threads make scoring faster. In a smaller model they wait for each other longer
than they compute, and use up the cores on which the engine starts meanwhile."""
PACKABLE = ("full_attention", "sliding_attention", "attention", "mlp", "moe")
"""Kinds in a config's `layer_types` for which packing is correct. For other kinds no short test can show it: chunked
attention, for example, differs only beyond its first chunk of 8,192 tokens."""
CARRIES = re.compile(r"mamba|conv|rwkv|recurrent|rglru|delta|lightning|lstm|mixer", re.IGNORECASE)
"""In class names of layers that move information between tokens in addition to attention..."""
CARRIES_NOT = re.compile(r"norm|block|decoder|mlp|conv\dd$", re.IGNORECASE)
"""... and in those of modules within and around them."""
WAY_OUT = "Use a plain causal decoder (Llama, Qwen2, Qwen3, Mistral), see docs/models.md"
BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""Exceptions of a third-party forward that was not written for these tensors and arguments."""


def agree_on_layout(model: PackedModel, name: str, dtype: str, longest: int, mesh: DeviceMesh | None) -> None:
    """Choose and set the layout of `model`. Collective if it is sharded.

    Args:
        name: the setting and its value, for messages.
        dtype: dtype of the weights.
        longest: number of tokens of the longest sequence that is trained.

    Raises:
        ConfigError: in neither layout it computes what transformers does.
    """
    refusal = None
    try:
        # A kernel that is compiled is tried on its own, before its first use.
        with every_core() if mesh is None and is_large(model.hf) else nullcontext(), uncompiled():
            told = choose_layout(model, name, dtype, longest).value
    except ConfigError as error:
        told, refusal = str(error), error
    if mesh is not None:
        told = text_of_rank_zero(told, device_of(mesh))
    if told not in {layout.value for layout in Layout}:
        raise refusal or ConfigError(told)
    use_layout(model, Layout(told))


def is_large(hf: PreTrainedModel) -> bool:
    return sum(parameter.numel() for parameter in hf.parameters()) >= MANY


@contextmanager
def every_core() -> Iterator[None]:
    """Use all cores while scoring. A rank has a single thread by default, but a lone rank has all cores to itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_layout(model: PackedModel, layout: Layout) -> None:
    model.layout = layout
    # Not with set_attn_implementation: it skips models, and their masks, whose attention does not use the interface.
    model.hf.config._attn_implementation = PACKED_ATTENTION if layout is Layout.PACKED else own_attention(model.hf)


def own_attention(hf: PreTrainedModel) -> str:
    """The attention implementation that transformers uses in this model when the learner's is not used."""
    return "sdpa" if hf._supports_sdpa else "eager"


def with_our_attention(make: Callable[..., Any]) -> Any:
    """Call `make` with our attention; without it if a model accepts only implementations of its own list, as GPT-J."""
    try:
        return make(attn_implementation=PACKED_ATTENTION)
    except KeyError as error:
        if error.args != (PACKED_ATTENTION,):
            raise
        return make()


def blank(kind: Any, settings: Any, **options: Any) -> Any:
    """A model of the auto class `kind` by its config, with our attention where it accepts that."""

    def make(**attention: str) -> Any:
        # transformers writes the attention into the config, also where the model then refuses it.
        return kind.from_config(deepcopy(settings), **options, **attention)

    return with_our_attention(make)


@torch.no_grad()
def choose_layout(model: PackedModel, name: str, dtype: str, longest: int) -> Layout:
    """The layout in which `model` computes what transformers does; PACKED if both do.

    Raises:
        ConfigError: neither does, or the kind of attention is refused.
    """
    if problem := too_long_to_guess(model.hf.config.to_dict(), longest):
        raise ConfigError(f"{name}: {problem}")
    probes = probes_for(model.hf)[: PROBES_IN_ROWS if foreign_kinds(model.hf) else None]
    use_layout(model, Layout.ROWS)
    device = model.device
    try:
        alone = tuple(_flat(model.seen_alone(torch.from_numpy(ids).long().to(device))) for ids in probes)
    except BROKEN as error:
        raise ConfigError(
            f"{name}: transformers itself cannot score a sequence with it: {error!r}. {WAY_OUT}"
        ) from error
    finally:
        model.settle()
    if any(np.isnan(each).any() for each in alone):
        raise ConfigError(
            f"{name}: the scores that transformers itself gives a sequence are nan. Its weights are damaged, or come "
            "from a run that diverged. Give another checkpoint"
        )
    canary = Canary(sequences=probes, logprobs=alone, learner_dtype=dtype, wire_dtype=dtype)
    reason = unpackable(model, canary, longest)
    if not reason:
        return Layout.PACKED
    kind = type(model.hf).__name__
    try:
        found = apart(model, Layout.ROWS, canary)
    except BROKEN as error:
        raise ConfigError(f"{name}: the learner cannot run a {kind}: {error!r}. {WAY_OUT}") from error
    if not fits(found, dtype):
        raise ConfigError(
            f"{name}: the learner does not compute what transformers does with a {kind}: scores of single sequences "
            f"differ by up to {found.max:.3g}, packed or not. Its logits are more than lm_head(hidden), or its "
            f"training mode is random (dropout, for example). {WAY_OUT}"
        )
    log.log(
        logging.WARNING if is_first() else logging.DEBUG,  # every rank has the same result
        "%s: sequences of a %s cannot be packed: %s. Each runs in a row of its own, which is correct but costs more: "
        "a prompt is computed once per completion instead of once per group, and rows are padded to the longest of "
        "their micro-batch",
        *(name, kind, reason),
    )
    return Layout.ROWS


def probes_for(hf: PreTrainedModel) -> tuple[NDArray[np.int32], ...]:
    """[T] token ids each, within the model's vocabulary and maximum position."""
    settings = hf.config.get_text_config(decoder=True)
    longest = min(getattr(settings, "max_position_embeddings", None) or max(PROBE_LENGTHS), max(PROBE_LENGTHS))
    drawn = random_probes(int(settings.vocab_size), 0, count=len(PROBE_LENGTHS), length=longest)
    return tuple(ids[:length] for ids, length in zip(drawn, PROBE_LENGTHS, strict=True))


def foreign_kinds(hf: PreTrainedModel) -> list[str]:
    """The kinds of layers in its config for which packing is not known to be correct."""
    settings = hf.config.get_text_config(decoder=True)
    return sorted(set(getattr(settings, "layer_types", None) or ()) - set(PACKABLE))


def unpackable(model: PackedModel, canary: Canary, longest: int) -> str:
    """Why `model` cannot be packed; empty if it can. Raises ConfigError if its kind of attention is refused."""
    settings = model.hf.config.get_text_config(decoder=True)
    kinds = set(getattr(settings, "layer_types", None) or ())
    if foreign_kinds(model.hf):
        return f"it has layers of the kinds {', '.join(foreign_kinds(model.hf))}"
    windows: set[int | None] = set()
    try:
        found = apart(model, Layout.PACKED, canary, windows.add)
    except UnpackedCall:
        return f"{_carriers(model.hf)} does not know where they begin"
    except ConfigError:
        raise
    except BROKEN as error:
        return f"it fails on a pack ({type(error).__name__}: {str(error)[:120]})"
    if not fits(found, canary.learner_dtype):
        return (
            f"{_carriers(model.hf)} sees across their borders (scores packed and alone are up to {found.max:.3g} apart)"
        )
    window = getattr(settings, "sliding_window", None) or longest
    slides = "sliding_attention" in kinds or not kinds
    if slides and window < longest and windows <= {None}:
        return f"only its attention mask knows the sliding window of {window} tokens"
    return ""


def apart(
    model: PackedModel, layout: Layout, canary: Canary, note_window: Callable[[int | None], None] | None = None
) -> Difference:
    """Difference between the scores in `layout` and those of the single sequences in `canary`.

    Args:
        note_window: see `Packing`.
    """
    use_layout(model, layout)
    pack = Pack.of(canary.sequences, model.device)
    try:
        seen = model.seen(replace(pack, packing=replace(pack.packing, note_window=note_window)))
    finally:
        model.settle()
    lengths = [len(each) for each in canary.sequences]
    return compare(canary, [_flat(part) for part in seen.split(lengths)], _allowed(canary.learner_dtype).max)


def fits(found: Difference, dtype: str) -> bool:
    """Whether a difference can be explained by rounding."""
    return _allowed(dtype).admits(found)


def _allowed(dtype: str) -> Tolerance:
    # In bfloat16 rounding may select other experts; this bound is the one for mixtures, and not much wider.
    return tolerance(dtype, routed=True)


def _flat(scores: Tensor) -> NDArray[np.float32]:
    return scores.float().flatten().cpu().numpy()


def _carriers(hf: PreTrainedModel) -> str:
    """Class names of the layers responsible: those in addition to attention, or otherwise the attention itself."""
    names = {type(module).__name__ for module in hf.modules() if not isinstance(module, PreTrainedModel)}
    beside = {name for name in names if CARRIES.search(name) and not CARRIES_NOT.search(name)}
    return ", ".join(sorted(beside or {name for name in names if "Attention" in name} or {type(hf).__name__}))
