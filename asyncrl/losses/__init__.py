"""`policy_loss` and its parts; see docs/losses.md.

The names are loaded on first use: `asyncrl.config` imports `asyncrl.losses.config`, and with eager imports here the
replay server and `asyncrl --help` would load torch, which takes seconds and hundreds of megabytes, without using it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.losses.compose import LossOutput, policy_loss
    from asyncrl.losses.config import preset
    from asyncrl.losses.inputs import Denominators, LossInputs, TopK
    from asyncrl.losses.kl import kl_estimate
    from asyncrl.losses.presets import PRESETS
    from asyncrl.losses.settings import LossConfig

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

_HOME = {
    "PRESETS": "presets",
    "Denominators": "inputs",
    "LossConfig": "settings",
    "LossInputs": "inputs",
    "LossOutput": "compose",
    "TopK": "inputs",
    "kl_estimate": "kl",
    "policy_loss": "compose",
    "preset": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
