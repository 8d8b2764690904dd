"""What every engine refuses: requests and sequences that its model can never serve."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.stop_text import check_stop
from asyncrl.errors import ContextFullError, GenerationError, RequestError


def check_request(
    request: GenerateRequest, vocabulary: int, max_length: int, *, spared: int = 1, or_else: str = ""
) -> None:
    """Raises GenerationError for a request that an engine of `vocabulary` tokens and length `max_length`, of which a
    prompt must leave `spared` free, cannot serve. `or_else`: what makes this engine hold longer sequences."""
    ids, sampling = request.prompt_ids, request.sampling
    if len(ids) == 0 or request.n < 1 or sampling.max_new_tokens < 1:
        raise GenerationError(f"request {request.request_id!r} needs a prompt, n >= 1 and max_new_tokens >= 1")
    check_ids(ids, vocabulary)
    if sampling.temperature < 0:
        raise GenerationError(f"temperature must be >= 0 (0 is greedy), got {sampling.temperature}")
    check_stop(request)
    longest = len(ids) + sampling.max_new_tokens
    if longest > max_length:
        raise RequestError(
            f"prompt and max_new_tokens together are {longest} tokens, but the engine holds {max_length}. Shorten "
            f"either{or_else}"
        )
    if len(ids) > max_length - spared:
        raise ContextFullError(
            f"the prompt has {len(ids)} tokens, but of the {max_length} that the engine holds it must leave {spared}"
        )


def check_ids(ids: NDArray[np.int32], vocabulary: int) -> None:
    """Raises GenerationError for ids outside the vocabulary; on a GPU they would end the process."""
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise GenerationError(
            f"prompt token ids must be in [0, {vocabulary}), the model's vocabulary; got {ids.max()}. "
            "Is the tokenizer that of the model?"
        )
