"""Makes text games of gymnasium, and converts between them and a conversation."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium import spaces

from asyncrl.environments.stepped import shared
from asyncrl.errors import ConfigError
from asyncrl.user_code import load_function

SETTING = "environment.args.env"
SHINING = re.compile(r"\x1b\[[0-9;]*m(\S)\x1b\[0?m")
"""A letter that a text rendering marks by colours: the player's position, in gymnasium's own games."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Action named by a reply."""

    action: Any = None
    fault: str = ""
    """Why it is not an action; for the policy to read."""


def maker(env: str, args: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes one game: from an id of gymnasium's registry (`module:Name-v0` imports the module
    first), or from a function or class, `file.py:make` or `package.module:make`.

    Raises:
        ConfigError: the function cannot be loaded.
    """
    place, _, name = env.rpartition(":")
    if place.endswith(".py") or (place and name.isidentifier()):
        function = load_function(env, SETTING)
        return lambda: function(**args)
    return lambda: gymnasium.make(env, **args)


def made_once(env: str, make: Callable[[], Any], actions: Sequence[str]) -> Game:
    """Make one game, to learn its kinds of actions and observations; and a second, which must be another.

    Raises:
        ConfigError: it cannot be made or started, is not a text game, or is one that was made before.
    """
    try:
        inner, other = make(), make()
    except Exception as error:  # gymnasium's own, the user's, and those of their imports
        raise ConfigError(f"{SETTING}={env}: it cannot be created: {type(error).__name__}: {error}") from error
    lacking = [name for name in ("reset", "step", "action_space", "observation_space") if not hasattr(inner, name)]
    if lacking:
        raise ConfigError(
            f"{SETTING}={env} returned a {type(inner).__name__} without {lacking[0]}, so it is not a gymnasium.Env"
        )
    game = Game(inner, actions)
    try:
        fault = game.fault or shared(*(getattr(each, "unwrapped", each) for each in (inner, other)))
        if not fault:
            game.begin(0, None)
    except Exception as error:  # as above
        fault = f"it cannot be started: {type(error).__name__}: {error}"
    finally:
        game.close()
        if other is not inner:
            other.close()
    if fault:
        raise ConfigError(f"{SETTING}={env}: {fault}")
    return game


class Game:
    """One game. Each of its methods may take long, and is called on a thread.

    Args:
        inner: a `gymnasium.Env`.
        actions: names of the actions of a `Discrete` space.
    """

    def __init__(self, inner: Any, actions: Sequence[str]) -> None:
        self._inner, self._space = inner, inner.action_space
        self._one = threading.Lock()
        """An abandoned episode closes its game while a step may still run: it is then closed after that step."""
        self._over = self._closed = False
        self._names = [str(each).strip().lower() for each in actions]

    @property
    def fault(self) -> str:
        """Why it is not a text game; empty if it is one."""
        space = self._space
        if not isinstance(space, spaces.Text | spaces.Discrete):
            return f"actions must be texts or numbers (spaces.Text, spaces.Discrete); got {space}"
        if self._names and (not isinstance(space, spaces.Discrete) or len(self._names) != space.n):
            return f"environment.args.actions names {len(self._names)} actions, but those of the game are {space}"
        if not self._tells and getattr(self._inner, "render_mode", None) != "ansi":
            return (
                f"observations must be texts (spaces.Text); got {self._inner.observation_space}. If the game can be "
                "rendered as text, add environment.args.args.render_mode=ansi; else name a function that makes it in a "
                "gymnasium.wrappers.TransformObservation(game, to_text, spaces.Text(1000)), "
                "environment.args.env=file.py:make"
            )
        return ""

    @property
    def _tells(self) -> bool:
        return isinstance(self._inner.observation_space, spaces.Text)

    def begin(self, seed: int, options: Mapping[str, Any] | None) -> str:
        with self._used():
            observation, _ = self._inner.reset(seed=seed, options=dict(options) if options else None)
            return self._said(observation)

    def step(self, action: Any) -> tuple[str, float, bool, bool]:
        """Return its text, the reward, whether it is over, and whether that is due to its time limit."""
        with self._used():
            observation, reward, terminated, truncated, _ = self._inner.step(action)
            return self._said(observation), float(reward), bool(terminated), bool(truncated)

    def _said(self, observation: Any) -> str:
        if self._tells:
            return str(observation)
        return COLOURS.sub("", SHINING.sub(r"[\1]", str(self._inner.render()))).strip("\n")

    def spoken(self, text: str) -> Spoken:
        """Return the action that a text names."""
        space, text = self._space, text.strip()
        if isinstance(space, spaces.Text):
            if space.contains(text):
                return Spoken(action=text)
            return Spoken(fault=f"an action has {space.min_length} to {space.max_length} letters of those allowed")
        if text.lower() in self._names:
            return Spoken(action=int(space.start) + self._names.index(text.lower()))
        first, last = int(space.start), int(space.start + space.n) - 1
        if re.fullmatch(r"-?\d{1,18}", text) and first <= int(text) <= last:
            return Spoken(action=int(text))
        return Spoken(fault=f"an action is one of {', '.join(self._names) or f'{first} to {last}'}")

    def close(self) -> None:
        """Close at once, or when a running step ends: it may never end, so it is not waited for."""
        self._over = True
        self._close_if_free()

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            with self._one:
                yield
        finally:
            if self._over:
                self._close_if_free()

    def _close_if_free(self) -> None:
        if not self._one.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._closed = True
                self._inner.close()
        finally:
            self._one.release()
