"""Groups whose members came one by one (`replay.admission=sample`): handed out from the parts that are stored, as the
whole that the plan shows. Nothing but the texts of samples is copied for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.replay.codec import wire
from asyncrl.replay.codec.columns import Frame
from asyncrl.replay.codec.group import StoredGroup, decode_texts
from asyncrl.replay.codec.lease import Place


class Apart:
    """The parts get numbers of their own, under which a parcel is packed (`lease.pack_places`); its rows then say which
    group and trajectory they are.

    Args:
        groups: what is stored of each group of a plan, the parts in the order of the members.
    """

    def __init__(self, groups: Mapping[int, Sequence[StoredGroup]]) -> None:
        self.stored: dict[int, StoredGroup] = {}
        """By part."""
        self._parts: dict[int, list[int]] = {}
        self._begins: list[Place] = []
        """Of each part: its group, and the position there of its first trajectory."""
        self._where: dict[Place, Place] = {}
        """(group, trajectory) -> (part, trajectory of it)."""
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
        """The parcel of the parts as that of the groups; `sampled` as it was asked for, in groups."""
        table, extras, texts, *rest = parcel
        # The texts of the parts are the last frames: see `pack_places`.
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
    """Of a group, from those of its members: its prompt once, what each wrote, from the first beginning to the last
    end. Raises WireError."""
    each = [decode_texts(frame) for frame in frames]
    completions = [text for _, texts, _, _ in each for text in texts]
    return wire.pack([each[0][0], completions, min(started for *_, started, _ in each), max(end for *_, end in each)])
