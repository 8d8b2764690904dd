"""`environment.name=gymnasium`: an episode is one text game, a turn of the policy one step of it."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.episodes import EpisodeOver
from asyncrl.environments.late import late_import
from asyncrl.environments.own_thread import on_own_thread, start_thread
from asyncrl.environments.tools.calling import check_positive
from asyncrl.errors import ConfigError, EpisodeError

ASK = "Say your action between <action> and </action>. Between them stands the action alone."

AT_ONCE = 16
"""Number of steps that run concurrently: more threads would keep the event loop waiting."""


class Gymnasium(ChatEnvironment):
    """Each reward belongs to its turn, and the episode's reward is their sum. `reward.function` is not needed.

    A row may have `seed`, an integer (by default derived from the row's contents, so that siblings start alike), and
    `options`, which are passed to `reset`.

    Args:
        env: a registered id (`module:Name-v0` imports the module first), or a factory, `file.py:make`.
        args: its arguments, by name.
        tag: the action is between <tag> and </tag>, of which the last counts; empty takes the whole reply.
        actions: names of numbered actions, starting with the first.
        max_turns: limit on the replies of an episode.
        invalid_reward: reward of a reply without a valid action; the policy is told, and the game does not move.
        system: system message at the front; empty for none.
    """

    def __init__(
        self,
        env: str = "",
        args: Mapping[str, Any] | None = None,
        tag: str = "action",
        actions: Sequence[str] = (),
        max_turns: int = 32,
        invalid_reward: float = 0.0,
        system: str | None = None,
    ) -> None:
        if not env:
            raise ConfigError(
                "environment.name=gymnasium has no game. Name one: environment.args.env=ID, or file.py:make"
            )
        check_positive(max_turns=max_turns)
        if isinstance(actions, str):
            raise ConfigError(
                f"environment.args.actions must be a list: environment.args.actions=[...]; got {actions!r}"
            )
        if not re.fullmatch(r"\w*", tag):
            raise ConfigError(f"environment.args.tag must be a word; got {tag!r}")
        needs = "environment.name=gymnasium needs the package gymnasium"
        self._room: Any = late_import("games.made", needs, "gymnasium")
        self._make = self._room.maker(env, dict(args or {}))
        self._room.made_once(env, self._make, actions)
        self._actions, self._max_turns, self._invalid = list(actions), max_turns, float(invalid_reward)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self.several_turns = max_turns > 1
        self._tagged = re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL) if tag else None
        self._system = ASK.replace("action>", f"{tag}>") if system is None and tag else (system or "")

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
        game = self._room.Game(await self._threaded(self._make), self._actions)
        try:
            await self._play(game, chat, row)
        finally:
            start_thread(game.close, "game")  # not waited for: it may never end, nor would this episode
        return 0.0

    async def _threaded(self, call: Callable[[], Any]) -> Any:
        """waits for: one of AT_ONCE slots, then the call; unblocked by: its end, or `environment.timeout_s`: a call
        that is given up frees its slot."""
        async with self._at_once:
            return await on_own_thread(call, "game")

    async def _play(self, game: Any, chat: Conversation, row: dict[str, Any]) -> None:
        if self._system:
            chat.system(self._system)
        options = row.get("options")
        if options is not None and not isinstance(options, Mapping):
            raise EpisodeError(f"the row's options must be a dictionary; got {options!r:.80}")
        chat.user(chat.spell(await self._threaded(partial(game.begin, seed_of(row), options))))
        for _ in range(self._max_turns):
            try:
                reply = await chat.reply()
            except EpisodeOver:
                if chat.replies:
                    return
                raise
            spoken = game.spoken(self._named(reply.content))
            if spoken.fault:
                chat.reward(self._invalid, name="")
                chat.user(f"That is no action: {spoken.fault}. The game has not moved.")
                continue
            said, reward, over, late = await self._threaded(partial(game.step, spoken.action))
            chat.reward(reward, name="")
            if over or late:
                chat.truncated = late and not over
                return
            chat.user(chat.spell(said))
        chat.truncated = True

    def _named(self, text: str) -> str:
        if self._tagged is None:
            return text
        found = self._tagged.findall(text)
        return found[-1] if found else ""


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the row's seed. Raises EpisodeError for an invalid one."""
    seed = row.get("seed")
    if seed is None:
        return zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())
    if type(seed) is not int or seed < 0:
        raise EpisodeError(f"the row's seed must be an integer of 0 or more; got {seed!r:.80}")
    return seed
