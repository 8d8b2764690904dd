"""`learner.router_replay`: the policy's routers choose the experts that the engine's chose (Rollout Routing Replay, R3,
Ma et al., arXiv 2510.11370; of the proximal policy's instead in GSPO's Routing Replay, arXiv 2507.18071).

What an expert's output counts is the learner's own, with gradient: its router's logits over the experts that the engine
recorded (eq. 6). A router that is off by rounding, or by a few versions, else sends tokens to other experts, and the
log-probs of engine and learner are of two networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.checks.architecture import not_replayed
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import Packing
from asyncrl.learner.batch.recorded import OWN_CHOICE
from asyncrl.learner.model.layout import Layout
from asyncrl.learner.model.packed import PackedModel
from asyncrl.routers import gates_of, routers_of, weights_of


class RouterReplay:
    """Of one model: makes its routers follow `Packing.routing`.

    Raises:
        ConfigError: it is no mixture, or none that is proven; or it runs unpacked.
    """

    def __init__(self, model: PackedModel, name: str) -> None:
        problem = not_replayed(model.hf.config.to_dict())
        if model.layout is not Layout.PACKED:
            problem = problem or "it runs unpacked, and learner.router_replay=true follows packs alone. Set it to false"
        if problem:
            raise ConfigError(f"{name}: {problem}")
        self.routers = routers_of(model.hf)
        self._counts: Tensor | None = None
        for place, (layer, gate) in enumerate(gates_of(model.hf)):
            router = _Router(self, place)
            # Told by each layer, so that a layer that is computed again in the backward (activation checkpointing) is
            # told the same, whatever was computed in between.
            layer.register_forward_pre_hook(router.hear, with_kwargs=True)
            gate.register_forward_hook(router.choose)

    def told(self) -> tuple[Tensor, Tensor] | None:
        """How many of the choices since the last call would have been others, and of how many; None for none. Of
        forwards with gradient."""
        counts, self._counts = self._counts, None
        return None if counts is None else (counts[0], counts[1])

    @torch.no_grad()
    def count(self, own: Tensor, given: Tensor) -> None:
        """[tokens, k] each; a token whose choice is its own counts as none."""
        differ = (own.sort(-1).values != given.sort(-1).values).any(-1)
        known = given[:, 0] != OWN_CHOICE
        counts = torch.stack([(differ & known).sum(), known.sum()]).double()
        self._counts = counts if self._counts is None else self._counts + counts


@dataclass(slots=True)
class _Router:
    replay: RouterReplay
    place: int
    """Among the layers that have experts."""
    given: Tensor | None = None
    """[tokens, k] what it has to choose."""

    def hear(self, layer: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        packing: Packing | None = named.get("packing")
        routing = None if packing is None else packing.routing
        self.given = None if routing is None else routing[:, self.place].to(torch.int64)

    def choose(
        self, gate: nn.Module, positional: Any, answer: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = answer
        if self.given is None:
            return answer
        if torch.is_grad_enabled():
            self.replay.count(own, self.given)
        chosen = torch.where(self.given == OWN_CHOICE, own, self.given)
        return logits, weights_of(gate, logits, chosen).to(weights.dtype), chosen
