"""The versions of a run as the auditor keeps them: a plain table of parents, walked step by step."""

from __future__ import annotations

from asyncrl.types import NO_VERSION


class Lineage:
    """Parents have smaller numbers than their children, so two versions meet by climbing from the larger one."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.forks = 0
        self.newest = NO_VERSION

    def __contains__(self, version: int) -> bool:
        return version in self.parents

    def add(self, version: int, parent: int, length: int) -> str:
        """Add a version below `parent` (NO_VERSION: the initial weights). Returns what is wrong with it, or ``."""
        if version in self.parents:
            return f"version {version} is published twice"
        if version <= self.newest:
            return f"version {version} is published after version {self.newest}: numbers must grow"
        if parent == NO_VERSION and self.parents:
            parent = min(self.parents)
        if parent != NO_VERSION and parent not in self.parents:
            return f"version {version} has parent {parent}, which was never published"
        self.forks += parent != NO_VERSION and parent != self.newest
        self.parents[version], self.lengths[version] = parent, length
        self.newest = version
        return ""

    def distance(self, one: int, other: int) -> int:
        """Trained steps between two known versions, through their common ancestor."""
        steps = 0
        while one != other:
            if one < other:
                one, other = other, one
            steps += self.lengths[one]
            one = self.parents[one]
        return steps
