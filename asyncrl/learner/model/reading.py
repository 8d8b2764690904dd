"""Each rank reads its own part of a checkpoint directly from slices of its safetensors: no rank holds all of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file
from transformers.utils.loading_report import LoadStateDictInfo

from asyncrl.learner.parallel.sharding import part_and_box
from asyncrl.weights.boxes import Box, intersection, slices, volume, whole, within

log = logging.getLogger(__name__)


class EmptyOnMeta(TorchFunctionMode):
    """A model built in this context has its weights on `meta` and its buffers allocated: buffers that no checkpoint has
    (the frequencies of rotary embeddings) are computed during the build, and cannot be computed later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        return func(*args, **(options | {"device": "meta"} if func is torch.empty else options))


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, built in `EmptyOnMeta`, with its remaining parameters (norms, biases) moved to `meta` too."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                new = moved.setdefault(parameter, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
                module._parameters[name] = new
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The region of a model's tensor that a tensor of the checkpoint fills."""

    source: str
    region: Box
    """Region of the model's tensor."""
    stacked: bool = False
    """The checkpoint's tensor lacks the first dimension: it is one expert of a layer."""


class Unreadable(Exception):
    """Why the ranks cannot each read their part."""


@dataclass(slots=True)
class Checkpoint:
    """The open safetensors files of a model; tensors have the names in the files."""

    files: Mapping[str, Any]
    """Tensor name -> the open file that contains it."""
    shapes: Mapping[str, tuple[int, ...]]
    opened: ExitStack
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)
    """Of every tensor of the model that is read from it, see `pieces_of`."""
    read_bytes: int = 0
    """Bytes read so far, in the stored dtype."""
    largest: int = 0
    """Bytes of the largest slice so far, which is held in addition to the weights."""

    @classmethod
    def of(cls, path: str) -> Checkpoint:
        """Open the files of a checkpoint. Raises Unreadable, OSError, SafetensorError."""
        opened, files, shapes = ExitStack(), dict[str, Any](), dict[str, tuple[int, ...]]()
        for file in files_of(path):
            each = opened.enter_context(safe_open(file, framework="pt"))
            for name in each.keys():  # noqa: SIM118 (not a dict)
                files[name], shapes[name] = each, tuple(each.get_slice(name).get_shape())
        return cls(files=files, shapes=shapes, opened=opened)

    def identity(self) -> str:
        """Digest of names, shapes, dtypes and the first row of every tensor. Two machines may have different files in a
        folder of the same name, and their parts combined would make a model that nobody trained."""
        digest = xxhash.xxh3_128()
        for name, file in sorted(self.files.items()):
            part = file.get_slice(name)
            digest.update(f"{name}{part.get_shape()}{part.get_dtype()};".encode())
            row = file.get_tensor(name) if not part.get_shape() else part[:1]
            digest.update(row.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def unread(self, hf: PreTrainedModel) -> set[str]:
        """Names of tensors of the checkpoint that `pieces` do not use, but for those that transformers ignores in a
        checkpoint of such a model (buffers of older versions, layers that only other programs use)."""
        read = {piece.source for pieces in self.pieces.values() for piece in pieces}
        found = LoadStateDictInfo(
            missing_keys=set(),
            unexpected_keys=set(self.shapes) - read,
            skipped_pp_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
        )
        hf._adjust_missing_and_unexpected_keys(found)
        return found.unexpected_keys

    def read(self, name: str, box: Box) -> Tensor:
        """Read a slice to the host, in its stored dtype."""
        file = self.files[name]
        found = file.get_slice(name)[slices(box)] if box else file.get_tensor(name)
        self.read_bytes += found.nbytes
        self.largest = max(self.largest, found.nbytes)
        return found

    @torch.no_grad()
    def read_into(self, hf: nn.Module) -> None:
        """Fill this rank's part of every parameter of `hf`, which must be sharded and allocated, and the saved buffers;
        then close the files."""
        for name, parameter in hf.named_parameters():
            local, own = part_and_box(parameter)
            self.fill(local, own, self.pieces[name])
        for name, buffer in _saved_buffers(hf):
            self.fill(buffer, whole(buffer.shape), self.pieces[name])
        self.opened.close()
        count = sum(parameter.numel() for parameter in hf.parameters())
        log.info(
            "rank %d has read %.3g GB of the checkpoint, %.3g GB of them at once, for its part of %s parameters",
            *(dist.get_rank(), self.read_bytes / 1e9, self.largest / 1e9, f"{count:,}"),
        )

    def fill(self, target: Tensor, own: Box, pieces: Sequence[Piece]) -> None:
        """Fill `target`, the part `own` of a tensor made of `pieces`; with 0 if there are none."""
        if not pieces:
            target.zero_()
        for piece in pieces:
            common = intersection(own, piece.region)
            if volume(common):
                inside = within(piece.region, common)
                found = self.read(piece.source, inside[1:] if piece.stacked else inside)
                there = target[slices(within(own, common))]
                there.copy_(found.view(there.shape))


def files_of(path: str) -> list[Path]:
    """Paths of the safetensors of a checkpoint. Raises Unreadable if it has none, OSError if it cannot be fetched."""
    options: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    # A single file takes precedence over shards beside it, as in transformers' own loading.
    whole = cached_file(path, SAFE_WEIGHTS_NAME, **options)
    index = None if whole else cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options)
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else ()
    found = [cached_file(path, name, **options) for name in names] or [whole]
    if None in found:
        raise Unreadable("it has no safetensors")
    return [Path(str(file)) for file in found]


def pieces_of(
    hf: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], *, may_lack: Sequence[str] = ()
) -> dict[str, list[Piece]]:
    """The pieces of every parameter, once, and of every saved buffer, in a checkpoint with these `shapes`.

    Args:
        hf: without weights.
        may_lack: names of parameters that start at 0 if the checkpoint lacks them.

    Raises:
        Unreadable: a tensor is missing under its own name and shape, or loading does more than copy it.
    """
    if getattr(hf.config, "quantization_config", None) is not None:
        raise Unreadable("it is quantized")
    kept = hf._keep_in_fp32_modules or hf._keep_in_fp32_modules_strict
    if kept and hf.dtype != torch.float32:
        raise Unreadable(f"{', '.join(sorted(kept))} stay in float32")
    converted = _stacks(hf, shapes)
    aliases = _aliases(hf)
    found: dict[str, list[Piece]] = {}
    for name, tensor in [*hf.named_parameters(), *_saved_buffers(hf)]:
        others = [each for each in aliases.get(name, [name]) if each in shapes]
        if len(others) > 1:
            raise Unreadable(f"it has {' and '.join(others)}, which are one in the model")
        if name in converted:
            found[name] = converted[name]
        elif others and shapes[others[0]] == tuple(tensor.shape):
            found[name] = [Piece(source=others[0], region=whole(tensor.shape))]
        elif not others and name in may_lack:
            found[name] = []
        else:
            raise Unreadable(f"it has no {name} of shape {tuple(tensor.shape)}")
    if unmade := [name for name, buffer in hf.named_buffers() if buffer.is_meta and name not in found]:
        raise Unreadable(f"{', '.join(unmade)} is in no checkpoint")
    return found


def _aliases(hf: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first name."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {each[0]: each for each in names.values()}


def _saved_buffers(hf: nn.Module) -> list[tuple[str, Tensor]]:
    saved = hf.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in hf.named_buffers() if name in saved]


def _stacks(hf: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Piece]]:
    """Pieces of parameters that transformers stacks from the experts of a layer, if the checkpoint has these
    separately."""
    found: dict[str, list[Piece]] = {}
    for rule in get_model_conversion_mapping(hf):
        if not isinstance(rule, WeightConverter):
            continue
        (target,) = rule.target_patterns if len(rule.target_patterns) == 1 else ("",)
        for name, parameter in hf.named_parameters():
            if not target or not name.endswith(target):
                continue
            prefix, (experts, *rest) = name.removesuffix(target), parameter.shape
            sources = [[prefix + each.replace("*", str(e)) for each in rule.source_patterns] for e in range(experts)]
            if any(each not in shapes for expert in sources for each in expert):
                continue  # stored under its own name, or refused later
            if not _only_stacks(rule) or len(rest) != 2:
                raise Unreadable(f"{name} is computed from other tensors at load")
            found[name] = [piece for e, expert in enumerate(sources) for piece in _of_expert(e, expert, shapes)]
            if found[name][-1].region[1][1] != rest[0]:
                raise Unreadable(f"the experts of {name} have other shapes")
    return found


def _only_stacks(rule: WeightConverter) -> bool:
    """Whether the rule only stacks experts along dim 0 and concatenates their matrices along dim 1."""
    stack, *below = rule.operations
    whole = isinstance(stack, MergeModulelist) and stack.dim == 0
    return whole and all(isinstance(each, Concatenate) and each.dim == 1 for each in below) and len(below) <= 1


def _of_expert(number: int, sources: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[Piece]:
    pieces, row = list[Piece](), 0
    for source in sources:
        rows, columns = shapes[source]
        region = ((number, number + 1), (row, row + rows), (0, columns))
        pieces.append(Piece(source=source, region=region, stacked=True))
        row += rows
    return pieces
