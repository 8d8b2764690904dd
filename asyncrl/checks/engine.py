"""Engines and weight transports: settings that cannot work together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.checks.problem import Problems

if TYPE_CHECKING:
    from asyncrl.config import Config

RULES: tuple[Callable[[Config], Problems], ...] = ()
