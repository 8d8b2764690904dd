"""Encodes tracks, slices and flows as a Perfetto trace (protobuf), for ui.perfetto.dev.

Field numbers are those of perfetto's protos/perfetto/trace (TracePacket, TrackEvent, TrackDescriptor). No other fields
are written, so no package is needed; a test reads the result with perfetto's own classes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

SLICE_BEGIN, SLICE_END, INSTANT = 1, 2, 3
SEQUENCE = 1
"""`trusted_packet_sequence_id` of all packets."""


def varint(value: int) -> bytes:
    """Encode a protobuf varint of 64 bits; negative numbers as two's complement."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, content: bytes | str) -> bytes:
    """Encode a length-delimited field: a text or a message."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(data)) + data


def fixed(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<Q", value)


def process_track(uuid: int, pid: int, name: str) -> bytes:
    return _packet(block(60, number(1, uuid) + block(3, number(1, pid) + block(6, name))))


def lane_track(uuid: int, parent: int, name: str) -> bytes:
    return _packet(block(60, number(1, uuid) + block(2, name) + number(5, parent)))


def begin(track: int, at: int, name: str, notes: Mapping[str, object], flows: Iterable[int]) -> bytes:
    """Begin a slice at `at` ns. `flows` link it to the slices with the same numbers, in their order."""
    return _event(SLICE_BEGIN, track, at, _about(name, notes, flows))


def end(track: int, at: int) -> bytes:
    return _event(SLICE_END, track, at, b"")


def instant(track: int, at: int, name: str, notes: Mapping[str, object], flows: Iterable[int]) -> bytes:
    return _event(INSTANT, track, at, _about(name, notes, flows))


def _about(name: str, notes: Mapping[str, object], flows: Iterable[int]) -> bytes:
    said = b"".join(block(4, block(10, key) + _value(value)) for key, value in notes.items())
    return said + b"".join(fixed(47, flow) for flow in flows) + block(23, name)


def _value(value: object) -> bytes:
    return number(4, value) if isinstance(value, int) and not isinstance(value, bool) else block(6, str(value))


def _event(kind: int, track: int, at: int, about: bytes) -> bytes:
    return _packet(number(8, at) + block(11, about + number(9, kind) + number(11, track)))


def _packet(content: bytes) -> bytes:
    return block(1, content + number(10, SEQUENCE))
