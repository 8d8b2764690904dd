"""One sibling of a group in vLLM, in this process's engine or on a server. Imports no vllm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.stop_text import end_by_text


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
