"""A pretrained chat model for slow tests of what a random tiny model hides."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parts.pretrained import MissingModelError, pretrained_model


def pretrained_or_fail() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted once per machine. A test that cannot have it fails and says
    why, since a skipped one would look like a test that passed."""
    try:
        return pretrained_model()
    except MissingModelError as error:
        pytest.fail(f"this test needs a pretrained model: {error}", pytrace=False)
