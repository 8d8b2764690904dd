"""AdamW whose moments lie in host memory (`learner.offload=optimizer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from asyncrl.learner.sharding import local

HOST = torch.device("cpu")
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMoments(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) where the parameters are, one after the other: moments and count of steps of one
    go to its device for its step, and back. The same kernel, and bits, as with all of them there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group)

    def _step_of(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        kept = self.state[parameter]
        if not kept:
            kept["step"] = torch.zeros((), device=HOST)
            kept |= {name: torch.zeros_like(parameter, device=HOST) for name in MOMENTS}
        here = [local(kept[name]).to(parameter.device) for name in ("step", *MOMENTS)]
        count, first, second = here
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter)],
            [local(parameter.grad)],  # pyright: ignore[reportArgumentType]
            [first],
            [second],
            [],
            [count],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, value in zip(("step", *MOMENTS), here, strict=True):
            local(kept[name]).copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would put the moments where the parameters are."""
        super().load_state_dict(state_dict | {"state": {}})
        loaded: Mapping[Any, Mapping[str, Tensor]] = state_dict["state"]
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                self.state[parameter] = {name: value.to(HOST) for name, value in loaded[key].items()}
