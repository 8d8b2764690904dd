"""One sibling of a group in vLLM, in this process's engine or on a server. Imports no vllm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.stop_text import check_stop, end_by_text
from asyncrl.errors import ContextFullError, GenerationError, RequestError


@dataclass(slots=True, eq=False)
class Sibling:
    """One sequence to sample. `ticket` is its age: the oldest goes first."""

    request: GenerateRequest
    member: int
    ticket: int
    overtaken: bool = False
    """Whether weights were loaded while it was with vLLM without a token: it starts again under the new version."""
    end: int | None = None
    """Number of tokens up to the end of its stop text, once one was sampled."""
    seen: int = 0
    """Number of tokens that were searched for a stop text."""

    def begin(self) -> None:
        """Reset for a new start, with nothing sampled."""
        self.overtaken, self.end, self.seen = False, None, 0

    def ends_now(self, token_ids: Sequence[int]) -> bool:
        """Whether a stop text has just been found in its tokens."""
        if self.end is not None:
            return False
        self.end = end_by_text(self.request, token_ids, self.seen)
        self.seen = len(token_ids)
        return self.end is not None


def check_request(request: GenerateRequest, vocabulary: int, max_length: int, spared: int = 1) -> None:
    """Raises GenerationError for a request that an engine of `vocabulary` tokens and length `max_length`, of which a
    prompt must leave `spared` free, cannot serve."""
    ids, sampling, name = request.prompt_ids, request.sampling, request.request_id
    if len(ids) == 0 or request.n < 1 or sampling.max_new_tokens < 1:
        raise GenerationError(f"request {name!r} needs a prompt, n >= 1 and max_new_tokens >= 1")
    if not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise GenerationError(
            f"prompt token ids must be in [0, {vocabulary}), the model's vocabulary; got {ids.max()}. "
            "Is the tokenizer that of the model?"
        )
    if sampling.temperature < 0:
        raise GenerationError(f"temperature must be >= 0 (0 is greedy), got {sampling.temperature}")
    check_stop(request)
    longest = len(ids) + sampling.max_new_tokens
    if longest > max_length:
        raise RequestError(
            f"prompt and max_new_tokens together are {longest} tokens, but the engine holds {max_length}. Shorten "
            "either, or raise engine.max_model_len or engine.kv_cache_mb"
        )
    if len(ids) > max_length - spared:
        raise ContextFullError(
            f"the prompt has {len(ids)} tokens, but of the {max_length} that the engine holds it must leave {spared}"
        )


def version_label(policy_version: int) -> str:
    return str(policy_version)
