"""Loss, advantages and hook of the user, tried before a run, by a process of its own: this code never runs in a command
that only starts the others.

`python -m asyncrl.learner.own_trial SETTINGS ANSWER_FD PARENT_PID` is internal.
"""

from __future__ import annotations

import sys
from typing import Any

from asyncrl.advantages.own import try_advantages
from asyncrl.learner.hook import Hook
from asyncrl.losses.config import proximal_source, required_inputs
from asyncrl.losses.own import try_loss
from asyncrl.losses.settings import LossConfig
from asyncrl.own_code import answer
from asyncrl.schema import AdvantageConfig, LearnerConfig


def try_own(loss: LossConfig, advantage: AdvantageConfig, learner: LearnerConfig) -> None:
    """Loss and advantages, where they are the user's; `learner` says what they would be given.

    Raises:
        ConfigError, OwnCodeError: one cannot be used; the message names its setting.
    """
    if loss.function:
        try_loss(
            loss,
            proximal=proximal_source(loss, learner.optimizer_steps) != "none",
            reference="ref_logprobs" in required_inputs(loss),
        )
    if advantage.function:
        try_advantages(advantage)


def trial(settings: dict[str, Any]) -> None:
    """The hook is made, so that its arguments are judged, and not called: there is no model yet."""
    learner = LearnerConfig(**settings["learner"])
    try_own(LossConfig(**settings["loss"]), AdvantageConfig(**settings["advantage"]), learner)
    if learner.hook:
        Hook(learner, rank=0, world=1)


if __name__ == "__main__":
    answer(sys.argv[1:], trial)
