"""Settings of environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    name: str = "single_turn"
    """What turns a prompt into trajectories: `single_turn`, `tools` (calls functions), `python` (runs programs),
    `search` (asks a retriever), `reasoning_gym`, `gymnasium` (text games), `openai` (an agent written against that
    API), `verifiers`, or yours, `file.py:Name` or `package.module:Name`. See docs/environments.md."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, by name: `environment.args.max_turns=4`."""
    timeout_s: float = 0.0
    """Longest time in seconds for one episode of several turns; one that takes longer has failed and is generated
    again. 0: only `replay.group_timeout_s` limits it."""
    max_tokens: int = 0
    """Longest episode in tokens, prompt and observations included; a longer one is cut there and keeps its reward. 0:
    as long as the engine allows."""
