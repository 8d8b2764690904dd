"""Turn-based games: classes with `reset` and `step`, with one object per episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.chat.base import Message
from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.episodes import EpisodeOver
from asyncrl.errors import EpisodeError

NEEDED = ("reset", "step")


def is_stepped(made: Any) -> bool:
    """Whether a class, or an object, is such a game."""
    return all(callable(getattr(made, name, None)) for name in NEEDED)


def shared(game: object, other: object) -> str:
    """Why these two games of one factory cannot be played at once; empty if they can."""
    if game is not other:
        return ""
    return (
        f"it returned the same {type(game).__name__} twice, but each episode needs a game of its own, or those at once "
        "move each other's. Create the object inside the function, and keep only what never changes outside"
    )


class Stepped(ChatEnvironment):
    """`reset(row)` returns what the policy reads before its first turn, besides the row's messages; `step(text)` takes
    its reply and returns `(what it reads next, reward, done)`, or Gymnasium's five values. Each reward belongs to its
    turn, and the episode's reward is their sum.

    Args:
        factory: creates one game.
        args: arguments of the factory.
    """

    def __init__(self, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._factory, self._args = factory, dict(args)

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
        game = self._factory(**self._args)
        for message in _messages(await _awaited(game.reset(row))):
            chat.add(message)
        while True:
            try:
                reply = await chat.reply()
            except EpisodeOver:
                if not chat.replies:
                    raise
                return 0.0
            observation, reward, done = _step(await _awaited(game.step(reply.content)))
            chat.reward(reward, name="")
            if done:
                return 0.0
            for message in _messages(observation):
                chat.add(message)


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _step(answer: Any) -> tuple[Any, float, bool]:
    """Raises EpisodeError for an invalid step."""
    if isinstance(answer, tuple) and len(answer) == 3:
        observation, reward, done = answer
    elif isinstance(answer, tuple) and len(answer) == 5:
        observation, reward, done = answer[0], answer[1], answer[2] or answer[3]
    else:
        raise EpisodeError(
            "step() must return (observation, reward, done), or (observation, reward, terminated, truncated, info); "
            f"got {answer!r:.80}"
        )
    return observation, float(reward), bool(done)


def _messages(observation: Any) -> list[Message]:
    """Messages of a text, of messages, or of nothing; also of Gymnasium's `(observation, info)`. Raises
    EpisodeError."""
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
        observation = observation[0]
    if observation is None or observation == "":
        return []
    if isinstance(observation, Mapping | list):
        messages = [dict(observation)] if isinstance(observation, Mapping) else observation
        if not all(isinstance(each, Mapping) and {"role", "content"} <= set(each) for each in messages):
            raise EpisodeError(
                "reset() and step() must give the policy a text, messages with `role` and `content`, or None to read; "
                f"got {observation!r:.80}"
            )
        return messages
    return [{"role": "user", "content": str(observation)}]
