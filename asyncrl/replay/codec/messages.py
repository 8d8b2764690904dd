"""Encodes small requests and replies as lists of plain values, and decodes and checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from asyncrl.errors import WireError
from asyncrl.evaluation.orders import EvalAssignment, EvalSummary
from asyncrl.evaluation.samples import MOST_SAMPLES, MOST_WORD, Sample, parts_for_the_wire, without_middle
from asyncrl.replay.codec import wire
from asyncrl.replay.protocol import Acquired, DroppedSample, PeerSeen, TrainedReply
from asyncrl.types import Assignment, DropReason

Record = TypeVar("Record")

MOST_CHARACTERS = 2048
"""Limit on the characters of a prompt, a completion or a reason."""

_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "int": lambda value, name: wire.integer(value, name, -1, wire.MAX_ID),
    "float": wire.number,
    "str": wire.text,
    "bool": lambda value, name: boolean(value, name),
    "tuple[float, ...]": lambda value, name: tuple(wire.number(item, name) for item in wire.sequence(value, name)),
    "dict[str, float]": lambda value, name: numbers(value, name),
    "dict[str, tuple[float | None, ...]]": lambda value, name: _columns(value, name),
    "float | None": lambda value, name: None if value is None else wire.number(value, name),
    "Mapping[str, float]": lambda value, name: numbers(value, name),
    "tuple[PeerSeen, ...]": lambda value, name: decode_records(PeerSeen, value),
    "tuple[Sample, ...]": lambda value, name: tuple(
        decode_record(Sample, item) for item in wire.sequence(value, name, limit=MOST_SAMPLES)
    ),
}


def boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise WireError(f"{name} must be true or false, not {wire.short(value)}")
    return value


def numbers(value: Any, name: str) -> dict[str, float]:
    """Raises WireError unless `value` maps strings to finite numbers."""
    return {key: wire.number(item, f"{name}[{key!r}]") for key, item in wire.mapping(value, name, 65536).items()}


def _columns(value: Any, name: str) -> dict[str, tuple[float | None, ...]]:
    return {
        key: tuple(None if item is None else wire.number(item, name) for item in wire.sequence(column, name))
        for key, column in wire.mapping(value, name).items()
    }


def encode_record(record: Any) -> list[Any]:
    """Encode a dataclass as the list of its fields; only samples and peers are nested."""
    values = [getattr(record, field.name) for field in fields(record)]
    return [_encoded(value) for value in values]


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [encode_record(item) if isinstance(item, Sample | PeerSeen) else item for item in value]
    return value


def decode_record(kind: type[Record], value: Any) -> Record:
    """Decode the dataclass `kind` from the list of its fields.

    Raises:
        WireError: a field is missing or has the wrong type.
    """
    expected = fields(kind)  # type: ignore[arg-type]
    row = wire.sequence(value, kind.__name__, len(expected))
    checked = {f.name: _CHECKS[str(f.type)](item, f.name) for f, item in zip(expected, row, strict=True)}
    return kind(**checked)


def decode_records(kind: type[Record], value: Any) -> tuple[Record, ...]:
    return tuple(decode_record(kind, row) for row in wire.sequence(value, kind.__name__))


def encode_acquired(acquired: Acquired) -> list[Any]:
    return [
        [encode_record(assignment) for assignment in acquired.assignments],
        [encode_record(evaluation) for evaluation in acquired.evaluations],
        acquired.stop,
        acquired.waiting_for,
    ]


def decode_acquired(value: Any) -> Acquired:
    assignments, evaluations, stop, waiting_for = wire.sequence(value, "acquired", 4)
    return Acquired(
        assignments=decode_records(Assignment, assignments),
        evaluations=decode_records(EvalAssignment, evaluations),
        stop=boolean(stop, "stop"),
        waiting_for=wire.text(waiting_for, "waiting_for"),
    )


def encode_trained(reply: TrainedReply) -> list[Any]:
    return [
        reply.metrics,
        *([encode_record(each) for each in several] for several in (reply.evaluations, reply.dropped)),
    ]


def decode_trained(value: Any) -> TrainedReply:
    metrics, evaluations, dropped = wire.sequence(value, "trained", 3)
    return TrainedReply(
        metrics=numbers(metrics, "metrics"),
        evaluations=decode_records(EvalSummary, evaluations),
        dropped=decode_records(DroppedSample, dropped),
    )


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
