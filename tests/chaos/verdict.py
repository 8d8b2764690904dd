"""The findings of a run of hostile programs, reward functions and tools."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Verdict:
    programs: int = 0
    rewards: int = 0
    tools: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    stalls: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    misjudged: list[str] = field(default_factory=list)
    escapes: list[str] = field(default_factory=list)

    def faults(self) -> dict[str, list[str]]:
        return {name: getattr(self, name) for name in ("stalls", "leaked", "failed", "misjudged", "escapes")}
