"""The base of environments that talk: yours says what one episode is, in messages, and nothing about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.chat.base import ToolSpec
from asyncrl.data.rows.messages import tools_of
from asyncrl.environments.base import EpisodeTools
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.episodes import EpisodeEnvironment
from asyncrl.environments.together import Together
from asyncrl.types import Prompt


class ChatEnvironment(EpisodeEnvironment[Conversation]):
    """An episode is one conversation, `chat`, that begins with the row's messages."""

    def specs(self, row: dict[str, Any]) -> Sequence[ToolSpec]:
        """Functions that the policy is told of."""
        return tools_of(row, "the row")

    def open(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> Conversation:
        return Conversation(prompt, tools, engine, self.specs(dict(prompt.columns)))
