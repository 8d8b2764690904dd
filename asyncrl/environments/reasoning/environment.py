"""`environment.name=reasoning_gym`: one reply, scored by its reasoning-gym task in a separate process."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from asyncrl.environments.chat import ChatEnvironment
from asyncrl.environments.conversation import Conversation
from asyncrl.environments.episodes import Asked
from asyncrl.environments.tools.sessions import SharedSessions, ToolHost
from asyncrl.errors import ConfigError, RewardError

SCORER = "asyncrl.environments.reasoning.tasks:score"
COLUMN = "reasoning_gym"
ASK = (
    "Think first, then give the final answer between <answer> and </answer>. Between them stands the answer alone, in "
    "the form that the question asks for."
)


class ReasoningGym(ChatEnvironment):
    """Rows are those of `asyncrl.environments.reasoning.rows`. `reward.function` is not needed.

    Args:
        tagged: the answer is between <answer> and </answer>; false takes the whole reply.
        system: system message at the front; empty for none.
        timeout_s: limit for scoring one reply; past it the scoring process is ended, and the member has no reward.
        processes: number of processes that score concurrently.
    """

    several_turns = False

    def __init__(self, tagged: bool = True, system: str = ASK, timeout_s: float = 20.0, processes: int = 2) -> None:
        self.check()
        self._tagged, self._system, self._timeout_s = tagged, system, timeout_s
        self._host = ToolHost([SCORER])
        self._sessions = SharedSessions(self._host, processes)

    @staticmethod
    def check(**_: Any) -> Asked:
        """Check before a start: episodes have one turn. Raises ConfigError."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("environment.name=reasoning_gym needs reasoning-gym: pip install 'asyncrl[gym]'")
        return Asked(several=False)

    @staticmethod
    def check_row(row: dict[str, Any]) -> None:
        """Check before a start. Raises RewardError for a row without a task."""
        _task_of(row)

    async def episode(self, chat: Conversation, row: dict[str, Any]) -> float:
        task = _task_of(row)
        if self._system:
            chat.system(self._system)
        reply = await chat.reply()
        async with self._sessions.lent() as session:
            given = {**task, "reply": reply.content, "tagged": self._tagged}
            done, text = await session.call("score", given, self._timeout_s)
        if not done:
            raise RewardError(f"reasoning-gym's task {task['task']}: {text.removeprefix('Error: ')}")
        return float(text)

    def close(self) -> None:
        self._host.close()


def _task_of(row: dict[str, Any]) -> dict[str, Any]:
    """Raises RewardError for a row without a task."""
    given = row.get(COLUMN)
    if not isinstance(given, dict) or not {"task", "seed", "size", "index"} <= set(given):
        raise RewardError(
            f"the row has no column {COLUMN!r} with task, seed, size and index. Write the file with `python -m "
            "asyncrl.environments.reasoning.rows TASK`"
        )
    numbers = {name: given[name] for name in ("task", "seed", "size", "index")}
    return {**numbers, "config": json.dumps(given.get("config", {}))}
