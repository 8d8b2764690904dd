"""The tree of published weights. Staleness is the distance between two of its versions.

    0 ── 1 ── 2 ── 3 ── 4          first lineage
              └~ 5 ── 6            resumed from version 2: 5 has the same weights as 2 (a step of length 0)

    distance(1, 4) = 3    distance(2, 5) = 0    distance(4, 6) = 2 + 1 = 3, through their common ancestor 2

A version is the number of one publication and is never reused. Versions lie on chains, one chain per lineage, so the
distance of two versions of one lineage is a subtraction, regardless of the length of the run.

    0 ── 1 ── 2 ── 3 ── 4          a rank died after version 4, the checkpoint has version 1
         5 ── 6 ── 7               `again`: 5 is at the depth of 1, 6 at the depth of 2

The same settings on the same batches give the same history, so an automatic restart begins no lineage: distance(4, 7)
is 1, as it was between 4 and 3. A branch from 5 begins one, although 5 is the tip of its chain: 2, 3 and 4 are deeper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.errors import ReplayError
from asyncrl.types import NO_VERSION


@dataclass(slots=True)
class _Chain:
    """A lineage: consecutive versions without a fork."""

    parent: int
    """Index of the chain it forked from; -1 for the first."""
    fork_depth: int
    """Depth of the version it forked from."""
    tip: int
    deepest: int
    """Depth of its version furthest from the initial weights; deeper than the tip while the chain is repeated."""
    level: int
    """Number of forks between it and the first chain."""


class VersionTree:
    """All versions ever published, and the trained steps between them."""

    def __init__(self) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        """version -> (chain, depth); depth counts trained steps since the initial weights."""
        self._chains: list[_Chain] = []
        self._edges: list[tuple[int, int, int, int]] = []
        """(version, parent, length, again) of each version that is not the trained child of the preceding number."""
        self.newest = NO_VERSION

    def __contains__(self, version: int) -> bool:
        return version in self._place

    def publish(self, version: int, parent: int, *, length: int = 1, again: bool = False) -> None:
        """Add `version` below `parent` (NO_VERSION: the initial weights). Publishing the same edge again has no effect.

        `length` is 1 for weights that were trained from the parent and 0 for the parent's own weights under a new
        number, which is what a resumed learner publishes. Initial weights published again (by a learner that restarted
        before its first checkpoint) are the first ones under a new number.

        Args:
            again: the newest lineage is repeated from `parent` on, which is on that lineage or an ancestor of it.

        Raises:
            ReplayError: the number was used before for something else, or the parent was never published.
        """
        if version in self._place and self._parent_matches(version, parent, length):
            return
        if version <= self.newest:
            raise ReplayError(f"policy_version {version} is not above {self.newest}: versions are never reused")
        if parent == NO_VERSION and not self._place:
            self._chains.append(_Chain(parent=-1, fork_depth=0, tip=version, deepest=0, level=0))
            self._record(version, 0, 0, (version, NO_VERSION, 0, 0))
            return
        if parent == NO_VERSION:
            parent, length = self._edges[0][0], 0
        if parent not in self._place:
            raise ReplayError(f"policy_version {version} has parent {parent}, which was never published")
        chain, depth = self._place[parent]
        if again:
            chain = self._place[self.newest][0]
        elif self._chains[chain].tip != parent or (length == 0 and self._chains[chain].deepest > depth):
            level = self._chains[chain].level + 1
            self._chains.append(_Chain(parent=chain, fork_depth=depth, tip=parent, deepest=depth, level=level))
            chain = len(self._chains) - 1
        line = self._chains[chain]
        line.tip, line.deepest = version, max(line.deepest, depth + length)
        regular = parent == version - 1 and length == 1
        self._record(version, chain, depth + length, None if regular else (version, parent, length, int(again)))

    def distance(self, a: int, b: int, ahead: int = 0) -> int:
        """Return the number of trained steps on the path from `a` to `b` through their common ancestor.

        Args:
            ahead: steps that will have been trained from `b` by then. Adding them to the result would count them twice
                if `a` is ahead of `b`, as versions are that a learner had trained before it was restarted.

        Raises:
            ReplayError: one of them was never published.
        """
        try:
            chain_a, depth_a = self._place[a]
            chain_b, depth_b = self._place[b]
            depth_b += ahead
        except KeyError as error:
            raise ReplayError(f"policy_version {error.args[0]} was never published") from error
        if chain_a == chain_b:
            return abs(depth_a - depth_b)
        top_a, top_b = depth_a, depth_b
        while chain_a != chain_b:
            # The chain of the higher level moves up to its fork. One fork per iteration; forks are resumes, thus few.
            if self._chains[chain_a].level >= self._chains[chain_b].level:
                top_a = min(top_a, self._chains[chain_a].fork_depth)
                chain_a = self._chains[chain_a].parent
            else:
                top_b = min(top_b, self._chains[chain_b].fork_depth)
                chain_b = self._chains[chain_b].parent
        return depth_a + depth_b - 2 * min(top_a, top_b)

    def leads_to(self, ancestor: int, version: int) -> bool:
        """Whether `version` has the weights of `ancestor`, or was trained from them."""
        (chain_a, depth_a), (chain, depth) = self._place[ancestor], self._place[version]
        while chain != chain_a and chain >= 0:
            depth = min(depth, self._chains[chain].fork_depth)
            chain = self._chains[chain].parent
        return chain == chain_a and depth_a <= depth

    def snapshot(self) -> list[list[int]]:
        """`[[version, parent, length, again], ...]` of irregular versions, then `[newest]`: short in a long run too."""
        return [list(edge) for edge in self._edges] + [[self.newest]]

    @classmethod
    def restore(cls, snapshot: Any) -> VersionTree:
        """Rebuild the tree from what `snapshot` returned. Raises ReplayError if a checkpoint has something else."""
        if not isinstance(snapshot, list) or not snapshot:
            raise ReplayError("the checkpoint's version tree is not a list, so asyncrl did not write the checkpoint")
        for row in snapshot:
            if not isinstance(row, list) or len(row) not in (1, 4) or not all(type(value) is int for value in row):
                raise ReplayError(
                    f"the checkpoint's version tree has the row {row!r}; expected [version, parent, length, again]"
                )
        tree = cls()
        edges, newest = snapshot[:-1], snapshot[-1][0]
        for position, (version, parent, length, again) in enumerate(edges):
            tree.publish(version, parent, length=length, again=bool(again))
            following = edges[position + 1][0] if position + 1 < len(edges) else newest + 1
            for regular in range(version + 1, following):
                tree.publish(regular, regular - 1)
        return tree

    def _record(self, version: int, chain: int, depth: int, edge: tuple[int, int, int, int] | None) -> None:
        self._place[version] = (chain, depth)
        self.newest = version
        if edge is not None:
            self._edges.append(edge)

    def _parent_matches(self, version: int, parent: int, length: int) -> bool:
        for known, known_parent, known_length, _ in self._edges:
            if known == version:
                return parent == NO_VERSION or (known_parent, known_length) == (parent, length)
        return parent == version - 1 and length == 1
