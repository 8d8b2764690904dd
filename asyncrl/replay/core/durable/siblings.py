"""Joins the members of a group that was admitted by sample (`replay.admission=sample`).

    Begun(first, members) ──▶ in flight ──▶ inserted ─┐
                              in flight ──▶ inserted ─┼─▶ a group that is whole: judged, sealed, trained as one
                              in flight ──▶ dropped   ┘   (or dropped as `incomplete`, if too few are left)

Each member has its own id, place and life cycle, may come from another worker and other versions than its siblings, and
is durable once it is inserted. A group is whole when none of its members is in flight. From then on both gates treat it
like a group admitted at once: over-age tokens are masked wherever they are (`mask`), or the whole group is dropped for
a single one (`drop`), or the learner waits so that there is none (`wait`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from asyncrl.replay.core.durable.ledger import Entry
from asyncrl.types import GroupHeader

Group = list[Entry]
"""The remaining entries of a group: its members by id, or the single entry of a group admitted as a whole."""


def whole_groups(waiting: Iterable[Entry], in_flight: Iterable[Entry]) -> tuple[list[Group], list[Group]]:
    """Return the whole groups, in the order in which they became whole, and the waiting members of the others."""
    missing = {entry.first for entry in in_flight if entry.siblings}
    whole: dict[int, Group] = {}
    parts: dict[int, Group] = {}
    for entry in waiting:
        if not entry.siblings:
            whole[entry.group_id] = [entry]
        elif entry.first in missing:
            parts.setdefault(entry.first, []).append(entry)
        else:
            group = whole.pop(entry.first, [])  # its position is that of its last member
            group.append(entry)
            whole[entry.first] = group
    for group in whole.values():
        group.sort(key=lambda entry: entry.group_id)
    return list(whole.values()), list(parts.values())


def is_short(group: Group, may_lack: int) -> bool:
    """Whether more than `may_lack` of its members were lost."""
    return bool(group[0].siblings) and group[0].siblings - len(group) > may_lack


def groups_of(members: Iterable[Entry]) -> list[Group]:
    """The groups of a batch, in its order: siblings are adjacent in it."""
    return [list(group) for _, group in itertools.groupby(members, key=lambda entry: entry.whose)]


def joined(headers: Sequence[GroupHeader]) -> GroupHeader:
    """Join the headers of a group's members, given in the order of their ids. Its id is that of the first one left."""
    if len(headers) == 1:
        return headers[0]
    first = headers[0]
    return GroupHeader(
        group_id=first.group_id,
        prompt_index=first.prompt_index,
        attempt=max(header.attempt for header in headers),
        worker=first.worker,
        trajectories=tuple(trajectory for header in headers for trajectory in header.trajectories),
        nbytes=sum(header.nbytes for header in headers),
    )


def headers_of(members: Iterable[Entry]) -> tuple[GroupHeader, ...]:
    """The headers of the groups of a batch."""
    return tuple(joined([entry.header for entry in group if entry.header is not None]) for group in groups_of(members))
