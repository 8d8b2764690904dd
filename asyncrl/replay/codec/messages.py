"""Encodes dataclasses as lists of plain values, and decodes them, each field checked by its type; and the samples of
dropped groups within their limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from asyncrl.errors import WireError
from asyncrl.evaluation.samples import MOST_SAMPLES, MOST_WORD, Sample, parts_for_the_wire, without_middle
from asyncrl.replay.codec import wire
from asyncrl.replay.protocol import DroppedSample
from asyncrl.types import DropReason

Record = TypeVar("Record")
Check = Callable[[Any, str], Any]
"""`(value, name)`: returns the checked value, or raises WireError."""

MOST_CHARACTERS = 2048
"""Limit on the characters of a prompt, a completion or a reason."""
MAX_NUMBERS, MAX_ENTRIES = 65536, 1024
"""Limits on the entries of a map of numbers, and of any other."""


def boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise WireError(f"{name} must be true or false, not {wire.short(value)}")
    return value


Name = Annotated[str, lambda value, name: wire.text(value, name, wire.MAX_NAME)]
Count = Annotated[int, lambda value, name: wire.integer(value, name, 0, wire.MAX_ID)]
Version = Annotated[int, lambda value, name: wire.integer(value, name, -1, wire.MAX_VERSION)]
_PLAIN: dict[Any, Check] = {
    int: lambda value, name: wire.integer(value, name, -1, wire.MAX_ID),
    float: wire.number,
    str: wire.text,
    bool: boolean,
    Any: lambda value, name: value,
    list[int]: lambda value, name: wire.integers(value, name, 0, wire.MAX_ID),
}


def encode_record(record: Any) -> list[Any]:
    """Encode a dataclass as the list of its fields; dataclasses in it likewise."""
    return [_encoded(getattr(record, field.name)) for field in fields(record)]


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    return encode_record(value) if is_dataclass(value) else value


def decode_record(kind: type[Record], value: Any) -> Record:
    """Decode the dataclass `kind` from the list of its fields.

    Raises:
        WireError: a field is missing or has the wrong type.
    """
    checks = _checks_of(kind)
    row = wire.sequence(value, kind.__name__, len(checks))
    return kind(**{name: check(item, name) for item, (name, check) in zip(row, checks.items(), strict=True)})


@functools.cache
def _checks_of(kind: type[Any]) -> dict[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in fields(kind)}


def _check_of(hint: Any) -> Check:
    """Return the check of a field: that which its type is annotated with, or that of a plain type, a dataclass, or a
    tuple or map of them."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_dataclass(hint):
        return lambda value, name: decode_record(hint, value)  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return arguments[1]
    each = _check_of(arguments[1 if origin in (dict, Mapping) else 0])
    if origin is UnionType:  # with None
        return lambda value, name: None if value is None else each(value, name)
    if origin is tuple:
        limit = MOST_SAMPLES if arguments[0] is Sample else wire.MAX_FRAMES
        return lambda value, name: tuple(each(item, name) for item in wire.sequence(value, name, limit=limit))
    most = MAX_NUMBERS if arguments[1] is float else MAX_ENTRIES
    return lambda value, name: {
        key: each(item, f"{name}[{key!r}]") for key, item in wire.mapping(value, name, most).items()
    }


numbers = _check_of(dict[str, float])
"""Checks that a value maps strings to finite numbers."""


def decode_records(kind: type[Record], value: Any) -> tuple[Record, ...]:
    return tuple(decode_record(kind, row) for row in wire.sequence(value, kind.__name__))


def shortened(sample: DroppedSample) -> DroppedSample:
    """Return a sample of a dropped group, or of a member that a group lacks, within the limits: it is sent along with
    training traffic. A text that was cut says where, and how much is missing."""
    return replace(
        sample,
        prompt=without_middle(sample.prompt, MOST_CHARACTERS),
        completion=without_middle(sample.completion, MOST_CHARACTERS),
        detail=without_middle(sample.detail, MOST_CHARACTERS),
        finish_reason=without_middle(sample.finish_reason, MOST_WORD),
        dropped=without_middle(sample.dropped, MOST_WORD),
        reward=sample.reward if sample.reward is not None and math.isfinite(sample.reward) else None,
        rewards=parts_for_the_wire(sample.rewards),
    )


def encode_dropped(sample: DroppedSample | None) -> list[Any] | None:
    return None if sample is None else encode_record(shortened(sample))


def decode_dropped(value: Any) -> DroppedSample | None:
    """Raises WireError."""
    return None if value is None else decode_record(DroppedSample, value)


def decode_lost(value: Any) -> DroppedSample | None:
    """Decode a member that a group was closed without. Raises WireError."""
    sample = decode_dropped(value)
    return None if sample is None else replace(sample, dropped=decode_reason(sample.dropped).value)


def decode_reason(value: Any) -> DropReason:
    """Raises WireError: `value` is not a drop reason."""
    try:
        return DropReason(wire.text(value, "reason"))
    except ValueError as error:
        raise WireError(f"{wire.short(value)} is not a drop reason") from error
