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
from asyncrl.environments.episodes import Asked, EpisodeOver
from asyncrl.environments.late import late_import
from asyncrl.environments.own_thread import on_own_thread, start_thread
from asyncrl.environments.tools.calling import check_positive
from asyncrl.errors import ConfigError, EpisodeError

ASK = "Say your action between <action> and </action>. Between them stands the action alone."

AT_ONCE = 16
"""Steps that run side by side: more threads would keep the event loop waiting for its turn."""


class Gymnasium(ChatEnvironment):
    """Each reward is its turn's, and the episode's is their sum. `reward.function` is not needed.

    A row may have `seed`, an integer (where there is none it follows what is in the row: siblings begin alike), and
    `options`, which `reset` is given.

    Args:
        env: an id that is registered (`module:Name-v0` imports the module first), or what makes a game, `file.py:make`.
        args: what it is made with, by name.
        tag: the action stands between <tag> and </tag>, the last of them counts; empty takes the whole reply.
        actions: names of numbered actions, the first one's first.
        max_turns: replies of an episode.
        invalid_reward: of a reply without an action that the game takes; it is told so, and the game does not move.
        system: message that goes to the front; empty is none.
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
            raise ConfigError(f"environment.args.actions is a list: environment.args.actions=[...]; got {actions!r}")
        if not re.fullmatch(r"\w*", tag):
            raise ConfigError(f"environment.args.tag is a word; got {tag!r}")
        needs = "environment.name=gymnasium needs the package gymnasium"
        self._room: Any = late_import("games.made", needs, "gymnasium")
        self._make = self._room.maker(env, dict(args or {}))
        self._room.made_once(env, self._make, actions)
        self._actions, self._max_turns, self._invalid = list(actions), max_turns, float(invalid_reward)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self.several_turns = max_turns > 1
        self._tagged = re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL) if tag else None
        self._system = ASK.replace("action>", f"{tag}>") if system is None and tag else (system or "")

    @staticmethod
    def check(**args: Any) -> Asked:
        """Before a start, in a process of its own: makes a game and begins it. What it asks of the chat. Raises
        ConfigError."""
        return Gymnasium(**args).asked

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
        game = self._room.Game(await self._threaded(self._make), self._actions)
        try:
            await self._play(game, chat, row)
        finally:
            start_thread(game.close, "game")  # not waited for: it may never end, and then this episode would not either
        return 0.0

    async def _threaded(self, call: Callable[[], Any]) -> Any:
        """waits for: one of AT_ONCE to be done, then the call; unblocked by: that, or `environment.timeout_s`: a call
        that is given up counts no more."""
        async with self._at_once:
            return await on_own_thread(call, "game")

    async def _play(self, game: Any, chat: Conversation, row: dict[str, Any]) -> None:
        if self._system:
            chat.system(self._system)
        options = row.get("options")
        if options is not None and not isinstance(options, Mapping):
            raise EpisodeError(f"the row's options are a dictionary; {options!r:.80} came")
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
    """Raises EpisodeError for one that is none."""
    seed = row.get("seed")
    if seed is None:
        return zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())
    if type(seed) is not int or seed < 0:
        raise EpisodeError(f"the row's seed is an integer of 0 or more; {seed!r:.80} came")
    return seed
