"""AdamW variants that step one parameter at a time and store its moments differently from torch: their base class, and
moments in host memory (`learner.offload=optimizer`)."""

# Ours, because torchao's optimizer with host memory takes gradients as they are made: it would skip our clip.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from asyncrl.weights.publishing.sharding import local

MOMENTS = ("exp_avg", "exp_avg_sq")
HOST = torch.device("cpu")


class OneByOne(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101) that has the moments of only one parameter at a time as float32 on its device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, self.state[parameter], group)

    @abstractmethod
    def _step_of(self, parameter: nn.Parameter, kept: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Step `parameter`; `kept` is its state, empty before its first step."""

    @abstractmethod
    def _home(self, parameter: nn.Parameter) -> torch.device:
        """Device on which the state of `parameter` is kept."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, which however would move the state to the parameters' device and dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        loaded: Mapping[Any, Mapping[str, Tensor]] = state_dict["state"]
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                home = self._home(parameter)
                self.state[parameter] = {name: value.to(home) for name, value in loaded[key].items()}


def step_one(values: Tensor, gradient: Tensor, state: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    """AdamW step of one parameter, in place, with the kernel that torch's fused AdamW uses.

    Args:
        state: step count [], first and second moment, shaped like `values`; all float32 on its device.
    """
    count, first, second = state
    beta1, beta2 = group["betas"]
    adamw(
        [values],
        [gradient],
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


class HostMoments(OneByOne):
    """The moments and step count of a parameter are copied to its device for its step, and back. Uses the same kernel
    as when all of them are kept there, with bitwise the same result."""

    def _step_of(self, parameter: nn.Parameter, kept: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if not kept:
            kept["step"] = torch.zeros((), device=HOST)
            kept |= {name: torch.zeros_like(parameter, device=HOST) for name in MOMENTS}
        names = ("step", *MOMENTS)
        here = [local(kept[name]).to(parameter.device) for name in names]
        assert parameter.grad is not None
        step_one(local(parameter), local(parameter.grad), here, group)
        for name, value in zip(names, here, strict=True):
            local(kept[name]).copy_(value)

    def _home(self, parameter: nn.Parameter) -> torch.device:
        return HOST
