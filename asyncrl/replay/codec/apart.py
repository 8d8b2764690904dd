"""Serves groups whose members arrived one by one (`replay.admission=sample`): sends the stored parts as the whole group
that the plan shows. Only the texts of samples are copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import StoredGroup, decode_texts
from asyncrl.replay.codec.lease import Place


class Apart:
    """Numbers the parts so that a parcel can be packed from them (`lease.pack_places`), then renames the parcel's rows
    to the group and trajectory in the plan.

    Args:
        groups: the stored parts of each group of a plan, in the order of the members.
    """

    def __init__(self, groups: Mapping[int, Sequence[StoredGroup]]) -> None:
        self.stored: dict[int, StoredGroup] = {}
        """Stored parts, by part number."""
        self._parts: dict[int, list[int]] = {}
        self._begins: list[Place] = []
        """For each part: its group, and the position of its first trajectory in the group."""
        self._where: dict[Place, Place] = {}
        """(group, trajectory) -> (part, trajectory in the part)."""
        for group, parts in groups.items():
            position = 0
            for stored in parts:
                part = len(self.stored)
                self.stored[part] = stored
                self._parts.setdefault(group, []).append(part)
                self._begins.append((group, position))
                for own in range(len(stored.columns.rows)):
                    self._where[group, position] = part, own
                    position += 1

    def places(self, places: Iterable[Place]) -> set[Place]:
        return {self._where[place] for place in places}

    def parts(self, groups: Iterable[int]) -> list[int]:
        return [part for group in groups for part in self._parts[group]]

    def joined(
        self, parcel: Sequence[Any], frames: Sequence[Frame], sampled: Sequence[int]
    ) -> tuple[list[Any], list[Frame]]:
        """Convert a parcel of parts into one of groups; `sampled` has the requested positions of groups."""
        table, extras, texts, *rest = parcel
        # The last frames are the texts of the parts: see `pack_places`.
        kept, own = frames[: len(frames) - len(texts)], iter(frames[len(frames) - len(texts) :])
        whole = [join_texts([next(own) for _ in self._parts[group]]) for group in sampled]
        rows = [[group, len(kept) + place] for place, group in enumerate(sampled)]
        return [self._named(table), self._named(extras), rows, *rest], [*kept, *whole]

    def _named(self, rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
        named = []
        for part, first, *rest in rows:
            group, begins = self._begins[part]
            named.append([group, begins + first, *rest])
        return named


def join_texts(frames: Sequence[Frame]) -> bytes:
    """Return the texts frame of a group, from those of its members: the prompt once, every completion, the earliest
    start and the latest end. Raises WireError."""
    each = [decode_texts(frame) for frame in frames]
    completions = [text for _, texts, _, _ in each for text in texts]
    return wire.pack([each[0][0], completions, min(started for *_, started, _ in each), max(end for *_, end in each)])
