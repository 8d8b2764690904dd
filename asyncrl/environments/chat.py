"""Base class of conversational environments: a subclass defines one episode in messages, without handling tokens."""

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
    """An episode is one conversation, `chat`, that starts with the row's messages."""

    def specs(self, row: dict[str, Any]) -> Sequence[ToolSpec]:
        """Functions that are described to the policy."""
        return tools_of(row, "the row")

    def open(self, prompt: Prompt, tools: EpisodeTools, engine: Together) -> Conversation:
        return Conversation(prompt, tools, engine, self.specs(dict(prompt.columns)))
