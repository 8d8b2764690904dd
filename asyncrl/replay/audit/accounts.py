"""What the auditor keeps of each group and each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.types import GroupHeader


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group that was not dropped. Trained ones stay, so that a second step with them is seen."""

    prompt_index: int
    attempt: int
    state: str = "in_flight"
    """`in_flight`, `inserted`, `leased` or `trained`."""
    held: bool = True
    """In flight: a worker has it. False: it waits to be issued again."""
    steps: list[int] = field(default_factory=list)
    """It is planned for, or was trained in, in the surviving history."""
    before: int = 0
    """Steps it was trained in before the journal begins."""
    retired: bool = False
    """It was trained, waited for another step, and is used no more: over-age, or the run is over."""
    header: GroupHeader | None = None
    first: int = -1
    """Of a member of a group that was admitted by sample: the id of the first; -1: a whole group."""
    siblings: int = 0
    """How many that group was begun with."""

    @property
    def tokens(self) -> int:
        return sum(trajectory.loss_tokens for trajectory in self.header.trajectories) if self.header else 0


@dataclass(slots=True, kw_only=True)
class Step:
    members: tuple[int, ...]
    version: int
    """The learner's, at sealing."""
    ahead: int
    trained: bool = False
    evicted: bool = False
    committed: bool = False
    ages: Counter[int] = field(default_factory=Counter)
    """Staleness when it was trained -> loss tokens, over-age ones included."""
