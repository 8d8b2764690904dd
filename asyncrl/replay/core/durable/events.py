"""The events that can change the durable state of the replay: one event, one transition, one journal record.

`ReplayCore` decides and creates events; only `ReplayState.apply` applies them. A journal that stores the events and
applies them again at a restart therefore arrives at the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.evaluation.orders import EvalJob
from asyncrl.types import DropReason, GroupHeader


class Event:
    """One of the changes below; the journal knows each by the name of its class."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Published(Event):
    """A version that no step trained: initial weights, or restored weights under a new number."""

    policy_version: int
    parent: int


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """A group was admitted by sample (`replay.admission=sample`): its members have consecutive ids from `first` on,
    separate life cycles, and wait to be issued. The other events about groups then refer to single members."""

    first: int
    members: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Issued(Event):
    """A new group was admitted, or a returned one reissued (`group_id` is then known)."""

    group_id: int
    prompt_index: int
    attempt: int
    worker: str
    incarnation: str
    policy_version: int
    """The newest version at this time."""
    served_version: int
    """The version that the worker serves: no token of this attempt can be older."""
    request: int = -1
    """Number of the request that this answers. Repeated after a restart of the server, it gets the same assignment."""


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """An attempt ended without a result (failure, lost worker); the group waits to be issued again."""

    group_id: int
    counted: bool
    """Whether this attempt counts towards `max_attempts`."""


@dataclass(frozen=True, slots=True)
class Inserted(Event):
    header: GroupHeader
    payload: Any
    """Opaque; returned unchanged with the lease."""
    pass_rate: float = -1.0
    """Share of its members that passed, if there is a curriculum; -1: not measured."""


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    group_id: int
    reason: DropReason
    readmit: bool = False
    """Whether its prompt goes back into the stream."""
    detail: str = ""
    """For a filter: its name and its reason."""
    pass_rate: float = -1.0
    """As in `Inserted`: groups that a filter drops were measured too."""


@dataclass(frozen=True, slots=True)
class Sealed(Event):
    """The batch of `step`, in order."""

    step: int
    policy_version: int
    """The newest version at sealing: the one it will be trained at, or the parent of that one if leased ahead."""
    ahead: int
    members: tuple[int, ...]
    max_staleness: int = 0
    """The staleness bound in force."""


@dataclass(frozen=True, slots=True)
class Trained(Event):
    step: int
    policy_version: int
    """The version published by this step; its parent is the version before."""


@dataclass(frozen=True, slots=True)
class Reused(Event):
    """Trained groups wait to be sealed into another step (`replay.max_times_sampled`)."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retired(Event):
    """A trained group that waits or is planned to be trained again is over-age or no longer needed."""

    group_id: int


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The payloads of a trained, uncommitted step were released to free memory, and no journal has them. After a
    restore its groups are generated again."""

    step: int


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """All steps up to `step` are in a durable checkpoint."""

    step: int


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """The learner resumes from the checkpoint of `step` (-1: from the start), whose weights are `policy_version`."""

    step: int
    policy_version: int
    incarnation: str = ""
    """Incarnation of the learner that is the running one from now on."""
    settings: str = ""
    """Digest of its training settings."""
    again: bool = False
    """True: the same history is repeated, and plans and ages stay as they are. False: a branch begins, and planned
    groups are judged again by their distance in the version tree."""
    run: str = ""
    """This learner's name for its run, the same through all its resumes; empty if it gives none. Older records have
    none."""


@dataclass(frozen=True, slots=True)
class Joined(Event):
    """A worker said hello with a new incarnation; earlier ones of this name are refused from now on."""

    worker: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Announced(Event):
    """The learner posted something on the board."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationAsked(EvalJob, Event):
    """The learner requested an evaluation of a set. Its progress is not kept: after a restart it starts over."""


@dataclass(frozen=True, slots=True)
class EvaluationClosed(Event):
    """The learner has the result, or the evaluation was superseded."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Reloaded(Event):
    """This server's state does not cover the learner's checkpoint: it is replaced by the checkpoint's snapshot."""

    snapshot: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshotted(Event):
    """The first record of every journal segment: all state before it except payloads, which stay where they are."""

    run: dict[str, Any]
    """The run that the journal belongs to: `run_id`, `run_digest`, `boot`, and `settings` (of admission)."""
    previous_end: int
    """Journal position where the previous segment ends; -1: nothing was written before."""
    image: dict[str, Any]
    """See `asyncrl.replay.core.durable.image`."""
    places: tuple[int, ...]
    """Flat pairs (group id, journal position of the record with its payload)."""


@dataclass(frozen=True, slots=True)
class Surveyed(Event):
    """From now on prompts are drawn by the measured pass rates of groups, from these rows. Once per run."""

    rows: tuple[int, ...]
    """Number of rows of each source."""
    order: dict[str, Any]
    """`weights` of the sources, `seed` and `shuffle`: they determine which row a prompt is."""


@dataclass(frozen=True, slots=True)
class Configured(Event):
    """Other settings of admission are in force from now on."""

    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The run is finished: no step follows."""
