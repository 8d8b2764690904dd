"""Events as bytes and back: msgpack heads, payload frames as they came from the wire. Never pickle.

    record body:  u32 size of the head | head: [schema, kind, [field, ...]] | payload frames, one after the other

A new event needs its dataclass in `events.py`, nothing here, as long as its fields have types that `_FIELDS` knows. A
change of any event's fields needs a new `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from asyncrl.errors import WireError
from asyncrl.replay.codec import headers, messages, wire
from asyncrl.replay.codec.columns import Columns, Frame, Frames, joined_sizes, own_sizes
from asyncrl.replay.codec.group import StoredGroup
from asyncrl.replay.core.durable import events as ev

SCHEMA = 8
_EVENTS = (kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event))
KINDS: dict[str, type] = {kind.__name__: kind for kind in _EVENTS if kind is not ev.Event}
MAX_HEAD_BYTES = 1 << 30
"""The head of a snapshot lists every open group."""

Encoder = Callable[[Any, list[Frame]], Any]
"""`(value, frames)`: plain value for the head; bytes are appended to `frames`."""
Decoder = Callable[[Any, str, "_Tail"], Any]


class _Tail:
    """The payload bytes of a record, taken in order."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: Any) -> memoryview:
        wire.integer(size, "frame size", 0, len(self._data) - self._at)
        self._at += size
        return self._data[self._at - size : self._at]

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def encode_event(event: Any) -> list[Frame]:
    """The body of its record, as pieces to be written one after the other. `event` is any dataclass whose fields have
    types that `_FIELDS` knows.

    Raises:
        WireError: a field holds something that is no plain value.
    """
    frames: list[Frame] = []
    values = [_FIELDS[str(field.type)][0](getattr(event, field.name), frames) for field in fields(event)]
    head = wire.pack([SCHEMA, type(event).__name__, values])
    return [len(head).to_bytes(4, "little") + head, *frames]


def decode_event(body: bytes | memoryview, kinds: Mapping[str, type] = KINDS) -> Any:
    """The event of one record body, one of `kinds` by name; payloads are views of `body`.

    Raises:
        WireError: another schema, an unknown kind, or fields that do not fit it.
    """
    view = memoryview(body)
    if len(view) < 4:
        raise WireError(f"a record of {len(view)} bytes is too short")
    size = int.from_bytes(view[:4], "little")
    if size > len(view) - 4:
        raise WireError(f"a head of {size} bytes does not fit in a record of {len(view)}")
    head = wire.unpack(view[4 : 4 + size], max_bytes=MAX_HEAD_BYTES)
    if type(head) is not list or not head or head[0] != SCHEMA:
        schema = head[0] if type(head) is list and head else head
        raise WireError(f"a record has schema {wire.short(schema)}, this asyncrl reads schema {SCHEMA}")
    _, kind, values = wire.sequence(head, "record head", 3)
    if type(kind) is not str or kind not in kinds:
        raise WireError(f"a record of schema {SCHEMA} has the unknown kind {wire.short(kind)}; known: {sorted(kinds)}")
    expected = fields(kinds[kind])
    row = wire.sequence(values, kind, len(expected))
    tail = _Tail(view[4 + size :])
    decoded = [_FIELDS[str(f.type)][1](value, f.name, tail) for f, value in zip(expected, row, strict=True)]
    if tail.left:
        raise WireError(f"a record of kind {kind} has {tail.left} bytes too many")
    return kinds[kind](*decoded)


def _encode_payload(payload: Any, frames: list[Frame]) -> Any:
    """None, bytes, or a group as the server stores it: `[texts, [ids, log-probs, mask, ...], extras]`, sizes in bytes,
    three of each trajectory, of extras a row of each if any has them."""
    if payload is None:
        return None
    if isinstance(payload, bytes):
        frames.append(payload)
        return len(payload)
    if not isinstance(payload, StoredGroup):
        raise WireError(f"a payload of type {type(payload).__name__} cannot be journalled: only encoded groups can")
    frames += payload.frames
    extras = [list(row) for row in payload.side.rows] if payload.side else []
    return [len(payload.texts), [size for row in payload.columns.rows for size in row], extras]


def _decode_payload(value: Any, name: str, tail: _Tail) -> Any:
    if value is None:
        return None
    if type(value) is int:
        return bytes(tail.take(value))
    size, flat, extras = wire.sequence(value, name, 3)
    texts = tail.take(size)
    sizes = _decode_sizes(flat, tail)
    if not sizes or len(sizes) % 3:
        raise WireError(f"{name} has {len(sizes)} array sizes, not three for each trajectory")
    rows = tuple(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True))
    columns = joined_sizes(rows)
    joined = tail.take(sum(columns))
    own = tuple(tail.take(size) for size in own_sizes(rows))
    return StoredGroup(texts, Columns(rows, joined, own, columns), _decode_side(extras, name, tail))


def _decode_side(value: Any, name: str, tail: _Tail) -> Frames | None:
    """Not judged by a header: what the record holds was, when it came."""
    rows = tuple(tuple(_decode_sizes(row, tail)) for row in wire.sequence(value, name, limit=wire.MAX_TOKENS))
    if not all(rows):
        raise WireError(f"{name} has a trajectory without the size of its extras")
    if not rows:
        return None
    sizes = joined_sizes(rows, 1)
    return Frames(rows, tail.take(sum(sizes)), tuple(tail.take(own) for own in own_sizes(rows)), sizes)


def _decode_sizes(value: Any, tail: _Tail) -> list[int]:
    return wire.integers(value, "array size", 0, tail.left)


def _plain(value: Any, frames: list[Frame]) -> Any:
    return value


_FIELDS: dict[str, tuple[Encoder, Decoder]] = {
    "int": (_plain, lambda value, name, tail: wire.integer(value, name, -1, wire.MAX_ID)),
    "float": (_plain, lambda value, name, tail: wire.number(value, name)),
    "str": (_plain, lambda value, name, tail: wire.text(value, name)),
    "bool": (_plain, lambda value, name, tail: messages.boolean(value, name)),
    "tuple[int, ...]": (
        lambda value, frames: list(value),
        lambda value, name, tail: tuple(wire.integers(value, name, -1, wire.MAX_ID)),
    ),
    "dict[str, Any]": (_plain, lambda value, name, tail: wire.mapping(value, name, wire.MAX_FRAMES)),
    "list[Any]": (_plain, lambda value, name, tail: wire.sequence(value, name, limit=wire.MAX_TOKENS)),
    "DropReason": (lambda value, frames: value.value, lambda value, name, tail: messages.decode_reason(value)),
    "GroupHeader": (
        lambda value, frames: headers.encode_group_header(value),
        lambda value, name, tail: headers.decode_group_header(value),
    ),
    "Any": (_encode_payload, _decode_payload),
}
"""Annotation of an event's field -> how it is written and read."""
