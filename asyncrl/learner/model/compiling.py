"""`model.compile`: compiles every decoder layer separately with torch.compile.

Only the `forward` of a layer is compiled, and nothing around it: the hooks in which FSDP2 gathers its weights,
checkpointing and all names stay as they are. Layers of one class share the compiled code. The number of tokens is
symbolic in it, so that packs of all lengths run the same code and none is padded. Attention and the experts of a
mixture are excluded: they depend on the rows of a pack and on the choices of routers, and would be recompiled with
every micro-batch.

A dense layer becomes four graphs (before its attention, within it before and after the rows are formed, behind it), a
mixture's seven; each is compiled once with gradient and once without, and again for each way in which layers differ
(adapters that are off, a frozen model). All are built at the start (`warm_up`), so that a failure to build is known
before a worker has produced anything; a later failure ends the run with the same message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError
from torch.fx.experimental import _config as symbolic
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model.attention import PACKED_ATTENTION, packed_attention
from asyncrl.learner.model.layout import probes_for
from asyncrl.learner.model.packed import Layout, PackedModel
from asyncrl.learner.parallel.collectives import is_first

log = logging.getLogger(__name__)

VARIANTS = 64
"""Limit on variants of one graph. Beyond it torch continues uncompiled, with a line in the log. torch's default of 8 is
too low for a policy, its reference and a critic, with adapters on and off."""
UNBUILT = (TorchDynamoException, CppCompileError)
"""Exceptions of torch.compile for code that it cannot build. Other failures, such as the end of another rank, are not
among them."""


def compile_layers(model: PackedModel, setting: str) -> None:
    """Compile, in place, the layers of a model that is ready to train, sharded or not.

    Args:
        setting: the setting the model comes from, for messages.

    Raises:
        ConfigError: it runs unpacked.
    """
    if model.layout is not Layout.PACKED:
        raise ConfigError(
            f"{setting} runs unpacked, but model.compile=true needs packed sequences: unpacked rows have other lengths "
            "in every micro-batch. Set model.compile=false"
        )
    torch._dynamo.config.recompile_limit = VARIANTS
    # Sizes that happen to be equal in the first pack may differ in the next; torch 2.11 would then recompile
    # everything.
    symbolic.use_duck_shape = False
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in model.layers:
        for name, experts in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                experts.forward = torch.compiler.disable(experts.forward)
        # Not the module: its names would change, and the hooks of FSDP2 would be compiled with it.
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_forward, layer.forward, compiled, f"the layers of {setting}")


def _forward(
    plain: Callable[..., Any], compiled: Callable[..., Any], what: str, hidden: Tensor, *args: Any, **named: Any
) -> Any:
    # A rank without trajectories runs a single token, which would be compiled separately: torch specialises on size 1.
    if hidden.shape[1] == 1:
        return plain(hidden, *args, **named)
    with _buildable(what, hidden.device, UNBUILT):
        return compiled(hidden, *args, **named)


def warm_up(model: PackedModel, setting: str) -> None:
    """Build all code of a model with `compile_layers`, by running a small pack with gradient, if the model is trained,
    and without. Gradients are None afterwards. Collective.

    Raises:
        ConfigError: it cannot be built; ranks that can build it are left waiting for this one.
    """
    started, device = time.monotonic(), model.device
    pack = Pack.of(probes_for(model.hf), device)
    with _buildable(f"the layers of {setting}", device, UNBUILT):
        if any(parameter.requires_grad for parameter in model.parameters()):
            model.seen(pack).sum().backward()  # some graphs have their backward compiled here, not with the forward
            model.zero_grad()
        with torch.no_grad():
            model.seen(pack)
    model.settle()
    if is_first():
        log.info("model.compile=true: the layers of %s were compiled in %.0f s", setting, time.monotonic() - started)


@cache
def refuse_unbuildable(device: torch.device) -> None:
    """Raises ConfigError if torch.compile cannot build code for `device`; tested by building some."""
    if device.type == "cpu":
        # Otherwise every rank starts compile threads of its own, in addition to those of all others on the machine.
        torch._inductor.config.compile_threads = 1  # pyright: ignore[reportAttributeAccessIssue]
    with _buildable("code", device, (RuntimeError, OSError)):
        torch.compile(_doubled)(torch.ones(8, device=device))


@contextmanager
def _buildable(what: str, device: torch.device, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turns these errors into a ConfigError, because a restart would fail in the same way."""
    try:
        yield
    except errors as error:
        needs = "triton, which torch's CUDA wheels bring, and gcc" if device.type == "cuda" else "g++"
        text, _, _ = f"{type(error).__name__}: {error}".partition("Set TORCHDYNAMO_VERBOSE")
        said = " ".join(text.split())[:300]
        raise ConfigError(
            f"model.compile=true: torch.compile cannot build {what} for {device.type} here ({said}). Install {needs} "
            "(apt-get install g++ python3-dev; CXX names another compiler), or set model.compile=false"
        ) from error


def _doubled(x: Tensor) -> Tensor:
    return 2.0 * x.sin()
