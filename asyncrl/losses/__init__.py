"""`policy_loss` and its parts; see docs/losses.md."""

from asyncrl.losses.compose import LossOutput, policy_loss
from asyncrl.losses.inputs import Denominators, LossInputs, TopK
from asyncrl.losses.kl import kl_estimate
from asyncrl.settings.loss.keys import LossConfig
from asyncrl.settings.loss.meaning import preset
from asyncrl.settings.loss.presets import PRESETS

__all__ = [
    "PRESETS",
    "Denominators",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "TopK",
    "kl_estimate",
    "policy_loss",
    "preset",
]
