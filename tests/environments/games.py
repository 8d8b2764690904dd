"""Text games as users write them for gymnasium."""

from __future__ import annotations

import string
import time
from typing import Any

import gymnasium
from gymnasium import spaces


class Dig(gymnasium.Env):
    """Dig for a treasure in one of several holes; every hole tells its distance from the treasure."""

    def __init__(self, holes: int = 10, slow_s: float = 0.0) -> None:
        self.observation_space = spaces.Text(200, charset=string.printable)
        self.action_space = spaces.Text(10, charset="dig 0123456789")
        self.holes, self.slow_s, self.closed = holes, slow_s, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.treasure = (options or {}).get("treasure", int(self.np_random.integers(self.holes)))
        return f"There are {self.holes} holes. Say dig and a number. <|im_end|>", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.slow_s)
        word, _, number = action.partition(" ")
        if word != "dig" or not number.isdigit():
            return "Nothing happens.", -0.1, False, False, {}
        far = abs(int(number) - self.treasure)
        return f"The treasure is {far} holes away.", float(far == 0), far == 0, False, {}


class Pictures(Dig):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (3,))


ONE = Dig()


def one_for_all() -> gymnasium.Env[str, str]:
    return ONE


def one_in_wrappers() -> gymnasium.Env[str, str]:
    return gymnasium.wrappers.TimeLimit(ONE, max_episode_steps=3)


def no_game() -> object:
    return object()


gymnasium.registry.pop("Dig-v0", None)  # this file is loaded more than once
gymnasium.register("Dig-v0", entry_point=Dig, max_episode_steps=3)
