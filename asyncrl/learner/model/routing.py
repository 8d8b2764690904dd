"""`learner.router_replay`: the policy's routers choose the experts that the engine chose (Rollout Routing Replay, R3,
Ma et al., arXiv 2510.11370; GSPO's Routing Replay, arXiv 2507.18071, replays the proximal policy's choices instead).

The weights of the experts' outputs are the learner's own, with gradient: computed from its router's logits of
the recorded experts (eq. 6). Without replay a router that differs by rounding, or by a few versions, sends tokens to
other experts, and the log-probs of engine and learner are those of two different networks.
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
from asyncrl.learner.model.packed import Layout, PackedModel
from asyncrl.routers import gates_of, routers_of, weights_of


class RouterReplay:
    """Makes the routers of one model follow `Packing.routing`.

    Raises:
        ConfigError: it is no mixture, or one that is not tested; or it runs unpacked.
    """

    def __init__(self, model: PackedModel, name: str) -> None:
        problem = not_replayed(model.hf.config.to_dict())
        if model.layout is not Layout.PACKED:
            problem = problem or (
                "it runs unpacked, but learner.router_replay=true needs packed sequences. Set it to false"
            )
        if problem:
            raise ConfigError(f"{name}: {problem}")
        self.routers = routers_of(model.hf)
        self._counts: Tensor | None = None
        for place, (layer, gate) in enumerate(gates_of(model.hf)):
            router = _Router(self, place)
            # Set by each layer, so that a layer that is recomputed in the backward (activation checkpointing) gets the
            # same choices, whatever was computed in between.
            layer.register_forward_pre_hook(router.hear, with_kwargs=True)
            gate.register_forward_hook(router.choose)

    def told(self) -> tuple[Tensor, Tensor] | None:
        """How many choices since the last call differed from the router's own, and of how many; None for none. Counts
        forwards with gradient only."""
        counts, self._counts = self._counts, None
        return None if counts is None else (counts[0], counts[1])

    @torch.no_grad()
    def count(self, own: Tensor, given: Tensor) -> None:
        """Compare choices, [tokens, k] each. Tokens without a recorded choice are not counted."""
        differ = (own.sort(-1).values != given.sort(-1).values).any(-1)
        known = given[:, 0] != OWN_CHOICE
        counts = torch.stack([(differ & known).sum(), known.sum()]).double()
        self._counts = counts if self._counts is None else self._counts + counts


@dataclass(slots=True)
class _Router:
    replay: RouterReplay
    place: int
    """Index among the layers that have experts."""
    given: Tensor | None = None
    """[tokens, k] experts that it must choose."""

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
