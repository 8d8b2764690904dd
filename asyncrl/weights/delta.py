"""Delta publication: sends of a bucket only the elements that changed since the previous version, without loss.

    gaps    [k] uint16 distances between changed elements, then [k] their new values     few changes
    mask    one bit per element, then the new values of those set                          more
    full    the bucket as it is                                                            most of it changed

The smallest encoding is chosen for each bucket. At small learning rates an optimizer step changes most bfloat16 weights
by less than their last bit; nearly all float32 weights change, and are sent in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, UInt8

from asyncrl.errors import WeightsError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FARTHEST = 65535
_WORD = 8
FULL, GAPS, MASK = "full", "gaps", "mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One encoded bucket, as sent over the wire."""

    kind: str
    payload: UInt8[torch.Tensor, " bytes"]
    changed: int
    """Number of elements in the payload."""

    def header(self) -> list[Any]:
        """Header that is sent to the receiver before the payload: `[kind, bytes, changed]`."""
        return [self.kind, len(self.payload), self.changed]


def encode(new: UInt8[torch.Tensor, " bytes"], old: UInt8[torch.Tensor, " bytes"], element_bytes: int) -> Encoded:
    """Return the smallest of the three encodings of `new` for a receiver that has `old`.

    Args:
        element_bytes: bytes per element, 1, 2, 4 or 8; the buffers are multiples of 16 bytes.
    """
    fresh, known = (buffer.view(_INTEGERS[element_bytes]) for buffer in (new, old))
    changed = _changed(new, old, fresh, known)
    places = _with_stepping_stones(changed)
    sizes = {
        FULL: len(new),
        GAPS: len(places) * (2 + element_bytes),
        MASK: -(-len(fresh) // 8) + len(changed) * element_bytes,
    }
    kind = min(sizes, key=lambda name: sizes[name])
    if kind == FULL:
        return Encoded(kind=FULL, payload=new, changed=len(fresh))
    if kind == GAPS:
        gaps = torch.diff(places, prepend=places.new_full((1,), -1)) if len(places) else places
        # torch has no arithmetic on uint16, so the low two bytes of each distance are taken.
        low = gaps.to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
        return Encoded(kind=GAPS, payload=torch.cat([low, _bytes(fresh[places])]), changed=len(places))
    return Encoded(
        kind=MASK, payload=torch.cat([_pack(changed, len(fresh)), _bytes(fresh[changed])]), changed=len(changed)
    )


def apply(encoded: Encoded, buffer: UInt8[torch.Tensor, " bytes"], element_bytes: int) -> None:
    """Turn the old version in `buffer` into the new one, in place.

    Raises:
        WeightsError: the payload does not fit the bucket; the buffer may then be partly overwritten.
    """
    payload, target = encoded.payload, buffer.view(_INTEGERS[element_bytes])
    if encoded.kind == FULL and len(payload) == len(buffer):
        buffer.copy_(payload)
        return
    head = 2 * encoded.changed if encoded.kind == GAPS else -(-len(target) // 8)
    if encoded.kind not in (GAPS, MASK) or len(payload) != head + encoded.changed * element_bytes:
        raise WeightsError(f"a {encoded.kind!r} delta of {len(payload)} bytes does not fit {encoded.changed} elements")
    # Cloned: after a head of odd length the values would not be aligned.
    values = payload[head:].clone().view(_INTEGERS[element_bytes])
    places = _read_gaps(payload[:head]) if encoded.kind == GAPS else _unpack(payload[:head], len(target))
    if len(places) != encoded.changed or (len(places) and int(places[-1]) >= len(target)):
        raise WeightsError(f"a {encoded.kind!r} delta names elements that the bucket does not have")
    target[places] = values


def payload_limit(header: Sequence[Any], nbytes: int) -> int:
    """Return the number of bytes of the payload that `header` announces for a bucket of `nbytes`.

    Raises:
        WeightsError: more bytes than the bucket itself, or an invalid header.
    """
    kind, size, changed = header
    if kind not in (FULL, GAPS, MASK) or not 0 <= int(size) <= nbytes or not 0 <= int(changed) <= nbytes:
        raise WeightsError(f"a delta of {size} bytes ({kind!r}) was announced for a bucket of {nbytes}")
    return int(size)


def _changed(
    new: torch.Tensor, old: torch.Tensor, fresh: torch.Tensor, known: torch.Tensor
) -> Int[torch.Tensor, " changed"]:
    """Ascending positions of the elements that differ. Words of 8 bytes are compared first: most are equal, so it is
    faster."""
    words = (new.view(torch.int64) != old.view(torch.int64)).nonzero()[:, 0]
    per_word = _WORD // fresh.itemsize
    places = (words[:, None] * per_word + torch.arange(per_word, device=new.device)).view(-1)
    return places[fresh[places] != known[places]]


def _with_stepping_stones(places: Int[torch.Tensor, " changed"]) -> Int[torch.Tensor, " places"]:
    """Insert unchanged elements where two changed ones are farther apart than a gap can express."""
    if not len(places):
        return places
    gaps = torch.diff(places, prepend=places.new_full((1,), -1))
    stones = (gaps - 1) // _FARTHEST
    if not int(stones.max()):
        return places
    repeats = stones + 1
    last = torch.repeat_interleave(places, repeats)
    within = torch.arange(len(last), device=places.device) - torch.repeat_interleave(
        repeats.cumsum(0) - repeats, repeats
    )
    back = torch.repeat_interleave(stones, repeats) - within
    first = torch.repeat_interleave(places - gaps, repeats)
    return torch.where(back > 0, first + (within + 1) * _FARTHEST, last)


def _read_gaps(head: torch.Tensor) -> torch.Tensor:
    pairs = head.view(-1, 2).to(torch.int64)
    return (pairs[:, 0] + 256 * pairs[:, 1]).cumsum(0) - 1


def _bits(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _pack(places: torch.Tensor, length: int) -> torch.Tensor:
    flags = torch.zeros(-(-length // 8) * 8, dtype=torch.uint8, device=places.device)
    flags[places] = 1
    return (flags.view(-1, 8) * _bits(places.device)).sum(1, dtype=torch.uint8)


def _unpack(head: torch.Tensor, length: int) -> torch.Tensor:
    flags = (head[:, None] & _bits(head.device)) != 0
    return flags.view(-1)[:length].nonzero()[:, 0]


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


class DeltaChoice:
    """Decides whether the next version is sent as a delta: `never`, `always`, or `auto`, by how long the last ones
    took.

    A delta costs time at both ends; on a fast link that is more than it saves. `auto` returns to full versions when a
    delta was slower, and tries again after `retry` versions. A caller that does not know the link passes bytes instead
    of seconds.
    """

    def __init__(self, mode: str, retry: int = 50) -> None:
        self._mode, self._retry = mode, retry
        self._full_s = 0.0
        self._rest = 0

    @property
    def possible(self) -> bool:
        return self._mode != "never"

    def wanted(self) -> bool:
        if self._rest:
            self._rest -= 1
            return False
        return self.possible

    def sent_full(self, seconds: float) -> None:
        self._full_s = seconds

    def sent_delta(self, encode_s: float, send_s: float) -> None:
        """Record a delta. Applying it takes the receivers about as long as encoding took."""
        if self._mode == "auto" and 2 * encode_s + send_s > self._full_s:
            self._rest = self._retry
