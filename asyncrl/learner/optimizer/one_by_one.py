"""AdamW that steps one parameter after the other, with moments that are kept in another way than as torch does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class OneByOne(torch.optim.AdamW):
    """AdamW (arXiv 1711.05101): the moments of one parameter become float32 on its device for its step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, self.state[parameter], group)

    @abstractmethod
    def _step_of(self, parameter: nn.Parameter, kept: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Step `parameter`; `kept` is empty before its first one."""

    @abstractmethod
    def _home(self, parameter: nn.Parameter) -> torch.device:
        """Where what is kept of it lies."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would put what is kept where the parameters are, in their dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        loaded: Mapping[Any, Mapping[str, Tensor]] = state_dict["state"]
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                home = self._home(parameter)
                self.state[parameter] = {name: value.to(home) for name, value in loaded[key].items()}


def step_one(values: Tensor, gradient: Tensor, state: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    """In place, by the kernel that steps all of them elsewhere.

    Args:
        state: count of steps [], first and second moment, of the shape of `values`; all float32 on its device.
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
