"""The auditor's record of a run's versions: a plain table of parents, walked step by step. Only the audit uses it: it
checks `VersionTree` on the same events, and shares no code with it.
"""

from __future__ import annotations

from asyncrl.types import NO_VERSION


class Lineage:
    """The tree of versions. Parents have smaller numbers than their children, so the common ancestor of two versions is
    found by climbing from the larger one.

    If an automatic restart repeated a part of the history, the later versions are the `same` as the first ones at that
    place, and only the first are in the table.
    """

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.lengths: dict[int, int] = {}
        self.same: dict[int, int] = {}
        """Each version -> the version that represents its place."""
        self.forks = 0
        self.newest = NO_VERSION
        self._depths: dict[int, int] = {NO_VERSION: 0}
        """Place -> number of trained steps up to it."""
        self._trained: dict[int, int] = {}
        """Place -> the place that one step of training from it led to, in its own line."""

    def __contains__(self, version: int) -> bool:
        return version in self.same

    def __len__(self) -> int:
        return len(self.same)

    def add(self, version: int, parent: int, length: int, again: bool = False) -> str:
        """Add a version below `parent` (NO_VERSION: the initial weights). Returns what is wrong with it, or ""."""
        if version in self.same:
            return f"version {version} is published twice"
        if version <= self.newest:
            return f"version {version} is published after version {self.newest}: version numbers must increase"
        if parent == NO_VERSION and self.same:
            parent = min(self.same)
        if parent != NO_VERSION and parent not in self.same:
            return f"version {version} has parent {parent}, which was never published"
        before, place = self.newest, self.same.get(parent, NO_VERSION)
        self.newest = version
        known = self._walked(before, place) if again and parent != NO_VERSION else None
        if length == 1 and known is None:
            known = self._trained.get(place)
        if known is not None:
            self.same[version] = known
            return ""
        if length == 1:
            self._trained[place] = version
        self.forks += parent != NO_VERSION and parent != before
        self.same[version] = version
        self.parents[version], self.lengths[version] = place, length
        self._depths[version] = self._depths[place] + length
        return ""

    def _walked(self, newest: int, place: int) -> int:
        """Return the place on the newest line that has the depth of `place`."""
        here = self.same[newest]
        while self._depths[here] > self._depths[place]:
            here = self.parents[here]
        return here

    def distance(self, one: int, other: int, ahead: int = 0) -> int:
        """Return the number of trained steps between two known versions, through their common ancestor, once `ahead`
        more steps are trained from `other`."""
        one, other, steps = self.same[one], self.same[other], ahead
        for _ in range(ahead):
            if other in self._trained:
                other, steps = self._trained[other], steps - 1
        while one != other:
            if one < other:
                one, other = other, one
            steps += self.lengths[one]
            one = self.parents[one]
        return steps
