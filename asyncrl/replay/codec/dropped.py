"""Samples of dropped groups, and of members that groups lack, as shown to users. They are kept short because they are
sent along with training traffic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asyncrl.errors import WireError
from asyncrl.evaluation.samples import MOST_WORD, parts_for_the_wire, without_middle
from asyncrl.replay.codec import messages, wire
from asyncrl.replay.protocol import DroppedSample
from asyncrl.types import DropReason

MOST_CHARACTERS = 2048
"""Limit on the characters of a prompt, a completion or a reason."""


def shortened(sample: DroppedSample) -> DroppedSample:
    """Return the sample within the limits. A text that was cut says where, and how much is missing."""
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
    return None if sample is None else messages.encode_record(shortened(sample))


def decode_dropped(value: Any) -> DroppedSample | None:
    """Raises WireError."""
    return None if value is None else messages.decode_record(DroppedSample, value)


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
