"""Describes what is published: full versions and deltas, one safetensors file each, and the way to the newest version.

full v4 ── delta ──▶ v5 ── delta ──▶ v6          a version is identified by its fingerprint, not by its number:
                              full v6            after a resume another version 6 may follow
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.errors import WeightsError

_NAME = re.compile(r"v\d{8,}-[0-9a-f]+-[0-9a-f]+(\.delta)?\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One published file."""

    name: str
    nbytes: int
    digest: str
    """sha256 of the file, hexadecimal; empty if readers open it in the learner's own folder."""
    fingerprint: str
    """Fingerprint over all buckets of the version that the file leads to."""
    base: str = ""
    """Fingerprint of the version that the delta applies to; empty for a full version."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Item:
        """Raises WeightsError: not the name of a published file; it could point outside the folder."""
        item = cls(**{key: wire[key] for key in ("name", "nbytes", "digest", "fingerprint", "base")})
        if not is_name(item.name) or item.nbytes < 0:
            raise WeightsError(
                f"{item.name!r} of {item.nbytes} bytes was announced, which is not a published file of weights"
            )
        return item


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def way(items: Sequence[Item], newest: str, have: str) -> list[Item]:
    """Return the files that lead from a reader's version `have` (empty: none) to `newest`, with the fewest bytes, in
    order.

    Both are fingerprints. Empty if they are the same.

    Raises:
        WeightsError: no files lead there.
    """
    full = {item.fingerprint: item for item in items if not item.base}
    delta = {item.fingerprint: item for item in items if item.base}
    ways: list[list[Item]] = []
    steps: list[Item] = []
    at, seen = newest, set()
    while at not in seen:  # weights may return to earlier values
        seen.add(at)
        if at == have:
            ways.append(steps)
            break
        if at in full:
            ways.append([full[at], *steps])
        if at not in delta:
            break
        steps = [delta[at], *steps]
        at = steps[0].base
    if not ways:
        raise WeightsError(f"none of the {len(items)} published files leads to the version that was announced")
    return min(ways, key=lambda way: sum(item.nbytes for item in way))
