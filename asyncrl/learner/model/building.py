"""From a checkpoint to a model that is ready to train: loaded, tested for packing, sharded.

On one rank a model is loaded whole. On several ranks it is built twice, with a single copy of the weights: first to
compute in float32, sharded, so that differences between scores packed and alone can be told from rounding; then as it
is trained, with the shards of the first.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import varlen
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.checks.architecture import not_apart, not_shared, not_together
from asyncrl.checks.dtypes import dtype_on
from asyncrl.checks.parallel import EXPERT, TENSOR
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.base import Backend
from asyncrl.learner.model.attention_kernel import widest_head
from asyncrl.learner.model.attention_trial import kernel_of
from asyncrl.learner.model.compiling import compile_layers, refuse_unbuildable, warm_up
from asyncrl.learner.model.layout import agree_on_layout, use_layout
from asyncrl.learner.model.loading import Recipe, fill_from_rank_zero, on_rank_zero, own_part
from asyncrl.learner.model.packed import Layout, PackedModel
from asyncrl.learner.parallel.sequence import SequenceRanks
from asyncrl.learner.parallel.sharding import dim_size
from asyncrl.schema import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
assert varlen, "its import is what registers `torch_attn`"
ATTENTION = (
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
MATMUL = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
KEPT = {"nothing": (), "attention": ATTENTION, "matmul": (*ATTENTION, *MATMUL)}
"""Operations whose outputs a recomputed layer keeps besides its input, by `model.checkpoint_keep`: those that are most
expensive to compute for the memory they take. In a long sequence that is attention: its arithmetic grows with the
square of the length, its output with the length."""
Packed = TypeVar("Packed", bound=PackedModel)


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of `model.dtype`, with `auto` resolved."""
    return DTYPES[dtype_on(dtype, device.type)]


def built(
    recipe: Recipe[Packed], settings: ModelConfig, longest: int, device: torch.device, backend: Backend | None
) -> Packed:
    """The model on `device`, held by `backend`. On one rank in float32 it stays unsharded: FSDP2 has nothing to shard
    or cast there, and its hooks took a fifth of a small model's step. None means one rank, too. Collective.

    Args:
        longest: number of tokens of the longest sequence that is trained.

    Raises:
        one of `REFUSALS`: it cannot be loaded.
        ConfigError: it does not compute the same as in transformers.
    """
    if settings.compile:
        refuse_unbuildable(device)
    model = _held(recipe, settings, longest, device, backend)
    if settings.compile:
        compile_layers(model, recipe.setting)
        warm_up(model, recipe.setting)
    return model


def _held(
    recipe: Recipe[Packed], settings: ModelConfig, longest: int, device: torch.device, backend: Backend | None
) -> Packed:
    compute = compute_dtype(settings.dtype, device)
    if backend is None or backend.mesh.size() == 1:
        model = recipe.make(prepare(recipe.whole(), settings))
        agree_on_layout(model, recipe.setting, recipe.kept, longest, None)
        recipe.change(model, model.hf)
        recipe.start(model)
        if compute == torch.float32 and (backend is None or not backend.on_host):
            return model.to(device)
        assert backend is not None
        backend.shard(model, compute)
        return model
    read = read_sharded(recipe, device, backend)
    agree_on_layout(read, recipe.setting, "float32", longest, backend.mesh)
    if read.sequence is not None and read.layout is not Layout.PACKED:
        raise ConfigError(
            f"{recipe.setting} runs unpacked, but ranks can share only packed sequences. Set "
            "learner.sequence_parallel=1"
        )
    model = recipe.make(prepare(recipe.blank(), settings))
    use_layout(model, read.layout)
    recipe.change(model, read.hf)
    backend.shard(model, compute)
    take_over(model, read, home_of(backend, device))
    recipe.start(model)
    return model


def read_sharded(recipe: Recipe[Packed], device: torch.device, backend: Backend) -> Packed:
    """A model that computes in float32 with the weights of the checkpoint; each rank has its shards. Collective."""
    mesh = backend.mesh
    model = recipe.make(recipe.blank().eval())
    refuse_dims(model.hf.config, mesh, recipe.setting)
    part = own_part(recipe, model.hf, mesh)
    on_rank_zero(recipe.prove, mesh)
    if part is None:
        hf = on_rank_zero(recipe.load, mesh)
        model = model if hf is None else recipe.make(hf.eval())
        backend.shard(model, torch.float32, lambda module: fill_from_rank_zero(module, mesh))
        return model
    backend.shard(model, torch.float32)
    give_memory(model, home_of(backend, device), device)
    part.read_into(model.hf)
    return model


def refuse_dims(config: PretrainedConfig, mesh: DeviceMesh, setting: str) -> None:
    """Raises ConfigError if the ranks cannot split the layers of the model, its experts or its sequences as
    configured."""
    given, tensor, sequence = config.to_dict(), dim_size(mesh, TENSOR), SequenceRanks.here()
    problem = (
        not_together(given, tensor)
        or not_shared(given, 1 if sequence is None else sequence.size, tensor)
        or not_apart(given, dim_size(mesh, EXPERT))
    )
    if problem:
        raise ConfigError(f"{setting}: {problem}")


def home_of(backend: Backend, device: torch.device) -> torch.device:
    """Device of the parameters of a model that computes on `device`."""
    return torch.device("cpu") if backend.on_host else device


@torch.no_grad()
def give_memory(model: nn.Module, home: torch.device, device: torch.device) -> None:
    """Allocate every parameter that is on `meta` in `home`, a tied one once (`to_empty` would untie those that are no
    DTensors), and every buffer on `device`."""
    named = dict(model.named_parameters(remove_duplicate=False))
    made = {each: nn.Parameter(torch.empty_like(each, device=home), each.requires_grad) for each in set(named.values())}
    model.load_state_dict({name: made[each] for name, each in named.items()}, strict=False, assign=True)
    for name, buffer in model.named_buffers():
        _put(model, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


@torch.no_grad()
def take_over(model: PackedModel, read: PackedModel, home: torch.device) -> None:
    """Move the weights and buffers of `read`, which is not used afterwards, to `model`. Parameters that only `model`
    has are allocated in `home`."""
    weights = dict(read.named_parameters(remove_duplicate=False))
    taken: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = weights.get(name.replace(".base_layer.", "."))
        if found is not None:
            taken[name] = found
        elif parameter.is_meta:
            taken[name] = nn.Parameter(torch.empty_like(parameter, device=home), parameter.requires_grad)
    model.load_state_dict(taken, strict=False, assign=True)
    for name, buffer in read.named_buffers():
        _put(model, name, buffer)


def _put(model: nn.Module, name: str, buffer: Tensor) -> None:
    where, _, own = name.rpartition(".")
    model.get_submodule(where)._buffers[own] = buffer


def describe_attention(model: PackedModel, settings: ModelConfig) -> str:
    """What attention is computed with, and why."""
    if model.layout is not Layout.PACKED:
        return "transformers' own, each sequence in a row"
    width = widest_head(model.hf.config.get_text_config(decoder=True))
    return kernel_of(model.device, compute_dtype(settings.dtype, model.device), width).why


def checkpointing_options(keep: str) -> dict[str, Any]:
    """Keyword arguments for `torch.utils.checkpoint`."""
    options: dict[str, Any] = {"use_reentrant": False}
    if KEPT[keep]:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT[keep]))
    return options


def prepare(hf: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Make the model ready to train: no random operations, activation checkpointing if configured.

    The behavior policy has no dropout and no noise; either would be noise in every log-ratio here.
    """
    hf.eval()  # some routers also draw at random in training mode
    if not config.activation_checkpointing:
        return hf
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing_options(config.checkpoint_keep))
    layers = (module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % config.checkpoint_every == 0
    for module in hf.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # the module checks it before checkpointing; its submodules stay in eval mode
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # OPT and others call dropout as a function
    return hf
