"""Finds where a sampled text ends at a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.engines.base import GenerateRequest
from asyncrl.errors import GenerationError

BYTES_PER_LETTER = 4
SPARE_TOKENS = 8
"""Tokens decoded in front of a stop text: tokenizers treat the first token that they decode specially."""


def check_stop(request: GenerateRequest) -> None:
    """Raises GenerationError for stop texts that cannot be found."""
    if request.sampling.stop and (request.text_of is None or not all(request.sampling.stop)):
        raise GenerationError(
            f"request {request.request_id!r}: stop texts must not be empty, and need `text_of` to be found"
        )


def ended_by_text(request: GenerateRequest, ids: Sequence[int]) -> bool:
    """Whether the last of the sampled `ids` completes one of `sampling.stop`. Only the end of `ids` is decoded."""
    if not request.sampling.stop or request.text_of is None:
        return False
    window = BYTES_PER_LETTER * max(map(len, request.sampling.stop)) + SPARE_TOKENS
    text = request.text_of([int(token) for token in ids[-window:]])
    return any(stop in text for stop in request.sampling.stop)


def end_by_text(request: GenerateRequest, ids: Sequence[int], seen: int) -> int | None:
    """Return the number of `ids` up to the end of the first stop text, or None; the first `seen` were checked
    before."""
    if not request.sampling.stop:
        return None
    return next((count for count in range(seen + 1, len(ids) + 1) if ended_by_text(request, ids[:count])), None)
