"""What is shown of groups that were dropped: short, since it travels beside the training."""

from __future__ import annotations

import math
from dataclasses import replace

from asyncrl.evaluation.samples import MOST_WORD, parts_for_the_wire, without_middle
from asyncrl.replay.protocol import DroppedSample

MOST_CHARACTERS = 2048
"""Of a prompt, a completion or a reason."""


def shortened(sample: DroppedSample) -> DroppedSample:
    """Within the limits; a text that was cut says of how much, and where."""
    return replace(
        sample,
        prompt=without_middle(sample.prompt, MOST_CHARACTERS),
        completion=without_middle(sample.completion, MOST_CHARACTERS),
        detail=without_middle(sample.detail, MOST_CHARACTERS),
        finish_reason=without_middle(sample.finish_reason, MOST_WORD),
        reward=sample.reward if sample.reward is not None and math.isfinite(sample.reward) else None,
        rewards=parts_for_the_wire(sample.rewards),
    )
