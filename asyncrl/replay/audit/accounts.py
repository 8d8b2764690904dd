"""The auditor's account of each group and each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.types import GroupHeader


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group that was not dropped. Trained groups stay, so that training on one a second time is noticed."""

    prompt_index: int
    attempt: int
    state: str = "in_flight"
    """`in_flight`, `inserted`, `leased` or `trained`."""
    held: bool = True
    """Whether a worker has it while it is in flight. False: it waits to be issued again."""
    steps: list[int] = field(default_factory=list)
    """Steps for which it is planned or in which it was trained, in the surviving history."""
    before: int = 0
    """Number of steps in which it was trained before the journal begins."""
    retired: bool = False
    """It was trained, waited for another step, and is no longer used: over-age, or the run is over."""
    header: GroupHeader | None = None
    first: int = -1
    """For a member of a group admitted by sample, the id of the group's first member; -1 for a whole group."""
    siblings: int = 0
    """Number of members with which that group was started."""

    @property
    def tokens(self) -> int:
        return sum(trajectory.loss_tokens for trajectory in self.header.trajectories) if self.header else 0


@dataclass(slots=True, kw_only=True)
class Step:
    members: tuple[int, ...]
    version: int
    """The learner's policy version at sealing."""
    ahead: int
    trained: bool = False
    evicted: bool = False
    committed: bool = False
    ages: Counter[int] = field(default_factory=Counter)
    """Staleness at training -> number of loss tokens, including over-age ones."""
