"""Everything that can change the durable state of the replay. One event, one transition, one journal record.

`ReplayCore` decides and makes events; `ReplayState.apply` carries them out and is the only code that does. A journal
that stores the events and applies them again at a restart therefore arrives at the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.types import DropReason, GroupHeader


@dataclass(frozen=True, slots=True)
class Published:
    """A version outside any step: initial weights, or restored weights under a new number."""

    policy_version: int
    parent: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A group was admitted by sample (`replay.admission=sample`): its members have the ids from `first` on, a life of
    their own each, and wait to be issued. What else is said of groups is said of each of them."""

    first: int
    members: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Issued:
    """A new group was admitted, or a returned one handed out again (`group_id` is then known)."""

    group_id: int
    prompt_index: int
    attempt: int
    worker: str
    incarnation: str
    policy_version: int
    """Newest at this moment."""
    served_version: int
    """What the worker serves: no token of this attempt can be older."""
    request: int = -1
    """Number of the request that this answers. Asked again after a restart of the server, it gets the same order."""


@dataclass(frozen=True, slots=True)
class Returned:
    """An attempt ended without a group (failure, lost worker); the group waits to be issued again."""

    group_id: int
    counted: bool
    """Whether this attempt counts towards `max_attempts`."""


@dataclass(frozen=True, slots=True)
class Inserted:
    header: GroupHeader
    payload: Any
    """Opaque; whoever stores it gets it back with the lease."""
    pass_rate: float = -1.0
    """Share of its members that passed, where a curriculum wants to know; -1: not measured."""


@dataclass(frozen=True, slots=True)
class Dropped:
    group_id: int
    reason: DropReason
    readmit: bool = False
    """Put its prompt back in the stream."""
    detail: str = ""
    """Of a filter: its name, and what it said."""
    pass_rate: float = -1.0
    """As of `Inserted`: what a filter drops was measured all the same."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The batch of `step`, in order."""

    step: int
    policy_version: int
    """The newest version at sealing: the one it will be trained at, or that one's parent when leased ahead."""
    ahead: int
    members: tuple[int, ...]
    max_staleness: int = 0
    """The bound in force."""


@dataclass(frozen=True, slots=True)
class Trained:
    step: int
    policy_version: int
    """Published by this step; its parent is the version before."""


@dataclass(frozen=True, slots=True)
class Reused:
    """Groups that were trained wait to be sealed into another step (`replay.max_times_sampled`)."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the learner measured of the groups of a step that it has just trained (`replay.order=ess`)."""

    step: int
    ess: tuple[int, ...]
    """Effective sample size of their tokens' importance weights, in millionths of their number."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A group that was trained and waits, or is planned, to be trained again is over-age or not needed any more."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The payloads of a trained, uncommitted step were given up for memory, and no journal has them. A restore makes
    its groups anew."""

    step: int


@dataclass(frozen=True, slots=True)
class Committed:
    """All steps up to `step` are in a durable checkpoint."""

    step: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The learner goes on from the checkpoint of `step` (-1: from the start), whose weights are `policy_version`."""

    step: int
    policy_version: int
    incarnation: str = ""
    """Of the learner that is the running one from now on."""
    settings: str = ""
    """Digest of the settings that it trains by."""
    again: bool = False
    """The same history once more: plans stand, ages too. Otherwise a branch begins, and what was planned is judged anew
    by its distance in the version tree."""
    run: str = ""
    """What this learner calls its run, through all its resumes; empty where it says nothing. Records of before have
    none."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker said hello under a new incarnation; earlier ones of this name are refused from now on."""

    worker: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Announced:
    """The learner posted something on the board."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationAsked:
    """The learner wants a set scored. How far that has come is not kept: after a restart it begins anew."""

    job_id: int
    step: int
    policy_version: int
    eval_set: str
    rows: int
    chunk: int


@dataclass(frozen=True, slots=True)
class EvaluationClosed:
    """The learner has the result."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """This server's memory does not reach the learner's checkpoint: it becomes what the checkpoint remembers."""

    snapshot: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """The first record of every journal segment: all state before it except payloads, which stay where they are."""

    run: dict[str, Any]
    """Whose journal it is: `run_id`, `run_digest`, `boot`, and `settings` (of admission)."""
    previous_end: int
    """Journal position where the segment before ends; -1: nothing was written before."""
    image: dict[str, Any]
    """See `asyncrl.replay.core.durable.image`."""
    places: tuple[int, ...]
    """Flat pairs (group id, journal position of the record with its payload)."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """From here on prompts are drawn by what groups measure, of so many rows. Once in a run."""

    rows: tuple[int, ...]
    """Of each source."""
    order: dict[str, Any]
    """`weights` of the sources, `seed` and `shuffle`: what says which row a prompt is."""


@dataclass(frozen=True, slots=True)
class Configured:
    """A server goes on with this run under other settings of admission; they are in force from here on."""

    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """No step will follow."""


Event = (
    Published
    | Begun
    | Issued
    | Returned
    | Inserted
    | Dropped
    | Sealed
    | Trained
    | Weighed
    | Reused
    | Retired
    | Evicted
    | Committed
    | Restored
    | Joined
    | Announced
    | EvaluationAsked
    | EvaluationClosed
    | Reloaded
    | Snapshotted
    | Surveyed
    | Configured
    | Finished
)
