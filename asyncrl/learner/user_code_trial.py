"""Tries the user's loss, advantages and hook before a run, in a process of its own: this code never runs in a command
that only starts other processes.

`python -m asyncrl.learner.user_code_trial ANSWER_FD PARENT_PID` is internal.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from asyncrl.advantages.custom import try_advantages
from asyncrl.learner.hook import Hook
from asyncrl.losses.custom import try_loss
from asyncrl.schema import AdvantageConfig, LearnerConfig
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import proximal_source, required_inputs
from asyncrl.user_code import answer


def try_own(loss: LossConfig, advantage: AdvantageConfig, learner: LearnerConfig, device: torch.device) -> None:
    """Try the loss and the advantage function if they are the user's; `learner` determines their inputs. The loss gets
    tensors on `device`; advantages are computed on the CPU in any run.

    Raises:
        ConfigError, UserCodeError: one of them cannot be used; the message names its setting.
    """
    if loss.function:
        try_loss(
            loss,
            proximal=proximal_source(loss, learner.optimizer_steps) != "none",
            reference="ref_logprobs" in required_inputs(loss),
            device=device,
        )
    if advantage.function:
        try_advantages(advantage)


def trial(settings: dict[str, Any]) -> None:
    """Try what `settings` name. The hook is made, which checks its arguments, but not called: there is no model."""
    learner = LearnerConfig(**settings["learner"])
    try_own(LossConfig(**settings["loss"]), AdvantageConfig(**settings["advantage"]), learner, torch.device("cpu"))
    if learner.hook:
        Hook(learner, rank=0, world=1)


if __name__ == "__main__":
    answer(sys.argv[1:], trial)
