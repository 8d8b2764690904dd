"""The learner's part of the canary: its own log-probs of the probe tokens are sent with every version."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.chat.base import PromptRenderer
from asyncrl.checks.architecture import experts_in
from asyncrl.checks.dtypes import with_dtypes
from asyncrl.errors import NonFiniteError
from asyncrl.learner.batch.packing import Pack
from asyncrl.learner.model.policy import PolicyModel
from asyncrl.learner.publishing.probes import SETS, agreed_probes
from asyncrl.schema import Config
from asyncrl.weights.base import Publisher, PublishStats
from asyncrl.weights.canary import SPACING, Canary, Decoy

DISTURBED = 8.0
DECOYS = 8
"""Pairs of adjacent layers, the last of the model, that the first canary has exchanged as decoys. Layers before them
change log-probs by far more than rounding."""


class ProvingPublisher:
    """Implements `weights.base.Publisher` around another publisher: each version is sent with its canary.

    A worker may join at any version, so every version needs one. Collective like the publication itself: one small
    forward over all ranks.

    Raises:
        NonFiniteError: raised by `publish` if the policy's own log-probs are NaN, for example after an optimizer step
            with a learning rate far too large. Otherwise every engine would be blamed for it.
    """

    def __init__(
        self,
        publisher: Publisher,
        config: Config,
        model: PolicyModel,
        device: torch.device,
        tokenizer: PromptRenderer | None = None,
    ) -> None:
        """`tokenizer`: of the model, where that was read already."""
        self._publisher = publisher
        self._model = model
        self._device = device
        chosen = with_dtypes(config, learner=device.type)
        self._dtypes = (chosen.model.dtype, chosen.weights.wire_dtype)
        # Only the engine resolves its `auto`; beside a learner on a CPU it is assumed to be float32.
        self._look = "bfloat16" in (*self._dtypes, chosen.engine.dtype)
        self._probes = agreed_probes(config, model, device, tokenizer)
        self._way_out = (
            f"The last optimizer step caused this. Lower learner.lr (it is {config.learner.lr:g}) and continue from "
            "the last checkpoint with resume=auto"
        )
        self._decoys = DECOYS if self._look else 0
        self._stats: dict[str, float] = {}

    def publish(
        self, policy_version: int, tensors: Iterable[tuple[str, torch.Tensor]], canary: Canary | None = None
    ) -> PublishStats:
        started = time.perf_counter()
        if canary is None:
            canary = canary_of(
                *(self._model, self._probes, self._device, *self._dtypes),
                first=-(-len(self._probes) // SETS),
                with_noise=self._look,
                decoys=self._decoys,
            )
            self._decoys = 0  # where a loader puts each tensor does not change from version to version
            if any(np.isnan(logprobs).any() for logprobs in canary.logprobs):
                raise NonFiniteError(
                    f"log-probs of version {policy_version} of the policy are not numbers (nan), so no engine gets it. "
                    f"{self._way_out if policy_version else 'The model that the run begins with is broken'}"
                )
        middle = time.perf_counter()
        stats = self._publisher.publish(policy_version, tensors, canary)
        stopped = time.perf_counter()
        held = stopped - started + self._publisher.stats().get("weights/wait_s", 0.0)
        self._stats = {"weights/canary_s": middle - started, "weights/learner_stall_s": held}
        return stats

    def wait_sent(self) -> float:
        return self._publisher.wait_sent()

    def wait(self) -> float:
        return self._publisher.wait()

    @property
    def meets(self) -> bool:
        return self._publisher.meets

    def serve(self) -> None:
        self._publisher.serve()

    def stats(self) -> dict[str, float]:
        return self._publisher.stats() | self._stats

    def close(self, *, failed: bool = False) -> None:
        self._publisher.close(failed=failed)


def is_routed(model: PolicyModel) -> bool:
    """Whether tokens of this model are routed to experts. A model that names their number differently is checked as
    dense, which is stricter."""
    return experts_in(model.hf.config.get_text_config(decoder=True).to_dict()) > 0


@torch.no_grad()
def canary_of(
    model: PolicyModel,
    sequences: Sequence[NDArray[np.int32]],
    device: torch.device,
    learner_dtype: str,
    wire_dtype: str,
    *,
    first: int = 0,
    with_noise: bool = False,
    decoys: int = 0,
) -> Canary:
    """Canary of sequences, [T] token ids each: log-probs of tokens 1.. at temperature 1, from the forward used in
    training. `first` is `Canary.first`.

    Collective over the ranks; all compute the same. `with_noise` computes them twice, see `Canary.noise`; `decoys` once
    more for each of so many pairs of layers.
    """

    def split(flat: torch.Tensor) -> tuple[NDArray[np.float32], ...]:
        return tuple(np.split(flat.float().cpu().numpy(), np.cumsum([len(ids) - 1 for ids in sequences])[:-1]))

    pack = Pack.of(sequences, device)
    logprobs, _, largest = model.judge(pack)
    noise = math.inf
    if with_noise:
        with disturbed(model) as layers:
            others, *_ = model.judge(pack)
        if layers:  # for a model that does not name its layers the noise is unknown, which does not mean 0
            noise = float((others.float() - logprobs.float()).abs().mean()) / DISTURBED
    exchanged = tuple(Decoy(name=name, logprobs=split(model.judge(pack)[0])) for name in exchanging(model, decoys))
    model.settle()
    return Canary(
        sequences=tuple(sequences),
        logprobs=split(logprobs),
        learner_dtype=learner_dtype,
        wire_dtype=wire_dtype,
        first=first,
        routed=is_routed(model),
        largest_logit=float(largest.max()),
        noise=noise,
        decoys=exchanged,
    )


@contextmanager
def disturbed(model: PolicyModel) -> Iterator[int]:
    """Context in which each layer's outputs are off by up to DISTURBED times half of bfloat16's spacing; yields the
    number of layers. The disturbance is that much larger than the rounding in question, because otherwise the rounding
    of the computation itself would dominate the difference."""
    layers = layers_of(model)
    hooks = [layer.register_forward_hook(partial(_disturb, number)) for number, layer in enumerate(layers)]
    try:
        yield len(layers)
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: PolicyModel) -> list[torch.nn.Module]:
    kinds = set(model.hf._no_split_modules or ())  # FSDP2 inserts its own class before that of a sharded module
    return [module for module in model.hf.modules() if kinds & {each.__name__ for each in type(module).__mro__}]


def exchanging(model: PolicyModel, pairs: int) -> Iterator[str]:
    """The names of the last so many pairs of adjacent layers with equal shapes. While one is looked at, its layers are
    exchanged."""
    known = set(layers_of(model))
    stacks = (each for each in model.hf.modules() if isinstance(each, torch.nn.ModuleList) and known & set(each))
    for stack in stacks:
        # Others no loader can exchange, and a layer of another kind may fail on the inputs of this one (MiniMax).
        alike = [one for one in range(len(stack) - 1) if _shapes(stack[one]) == _shapes(stack[one + 1])]
        for one in alike[max(len(alike) - pairs, 0) :]:
            first, second = stack[one], stack[one + 1]
            stack[one], stack[one + 1] = second, first
            try:
                yield f"layers {one} and {one + 1} exchanged"
            finally:
                stack[one], stack[one + 1] = first, second


def _shapes(layer: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in layer.named_parameters()}


def _disturb(number: int, layer: Any, given: Any, out: Any) -> Any:
    if isinstance(out, tuple):
        return (_disturb(number, layer, given, out[0]), *out[1:])
    drawn = torch.Generator(out.device).manual_seed(number)
    relative = DISTURBED * SPACING * (torch.rand(out.shape, generator=drawn, device=out.device) - 0.5)
    return (out.float() * (1 + relative)).to(out.dtype)
