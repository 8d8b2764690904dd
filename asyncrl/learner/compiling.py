"""`model.compile`: every decoder layer by torch.compile, for itself.

Compiled is a layer's `forward` and nothing around it: the hooks in which FSDP2 gathers its weights, checkpointing and
all names stay as they are. Layers of one class share what was compiled. The number of tokens is a symbol in it, so that
packs of all lengths run the same code and none is padded. Attention and the experts of a mixture are left out: what
they do follows from the rows of a pack and from what routers choose, and would be compiled anew with every micro-batch.

A dense layer becomes four graphs (before its attention, within it before and after the rows are formed, behind it), a
mixture's seven; each once with gradient and once without, and again for whatever makes layers differ (adapters that are
off, a frozen model).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.learner.attention import PACKED_ATTENTION, packed_attention
from asyncrl.learner.layout import Layout
from asyncrl.learner.packed import PackedModel

VARIANTS = 64
"""Of one graph. Behind them torch goes on uncompiled, with a line in the log; its own 8 are few for a policy, its
reference and a critic, with adapters on and off."""


def compile_layers(model: PackedModel, setting: str) -> None:
    """In place, of a model that is ready to train, sharded or not.

    Args:
        setting: where it comes from, for messages.

    Raises:
        ConfigError: it runs unpacked.
    """
    if model.layout is not Layout.PACKED:
        raise ConfigError(
            f"{setting} runs unpacked, and model.compile=true compiles for packs alone: rows have other lengths in "
            "every micro-batch. Set model.compile=false"
        )
    torch._dynamo.config.recompile_limit = VARIANTS
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in model.layers:
        for name, experts in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                experts.forward = torch.compiler.disable(experts.forward)
        # Not the module: names would change, and the hooks of FSDP2 would be compiled with it.
        layer.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], hidden: Tensor, *args: Any, **named: Any) -> Any:
    # A single token, what a rank without trajectories runs, would be compiled for itself: 1 is no symbol to torch.
    return (plain if hidden.shape[1] == 1 else compiled)(hidden, *args, **named)


@cache
def refuse_unbuildable(device: torch.device) -> None:
    """Raises ConfigError where torch.compile cannot build code for `device`; found out by building some."""
    if device.type == "cpu":
        # Else every rank starts threads of its own to compile in, beside those of all others on the machine.
        torch._inductor.config.compile_threads = 1  # pyright: ignore[reportAttributeAccessIssue]
    try:
        torch.compile(_doubled)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        needs = "triton, which torch's CUDA wheels bring, and gcc" if device.type == "cuda" else "g++"
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"model.compile=true: torch.compile cannot build code for {device.type} here ({said}). Install {needs} "
            "(apt-get install g++ python3-dev; CXX names another compiler), or set model.compile=false"
        ) from error


def _doubled(x: Tensor) -> Tensor:
    return 2.0 * x.sin()
