"""What a server is asked for one sequence, and its answer as a `Completion`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import EngineDiedError, GenerationError
from asyncrl.types import NO_VERSION, Completion

TOLD_EVERY = 64
"""Tokens between two chunks: each is progress that the worker sees."""


class ServerGoneError(EngineDiedError):
    """This server gives no answer, or not as the one that was given our weights; others may."""


def generation_body(sibling: Sibling, name: str, salt: str) -> dict[str, Any]:
    """As `vllm.requests.sampling_of`, as the server reads it; without a seed, for the reason given there."""
    sampling = sibling.request.sampling
    return {
        "request_id": name,
        "token_ids": sibling.request.prompt_ids.tolist(),
        "cache_salt": salt,
        "stream": True,
        "sampling_params": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": 1 if sampling.stop else TOLD_EVERY,
        },
    }


def label_of(run: str, policy_version: int) -> str:
    """Of the weights that one engine of ours loads: no other run, and no server started anew, has the same."""
    return f"{run}:{policy_version}"


def version_in(label: str, run: str) -> int | None:
    """None: those weights are not ours."""
    ours, _, version = label.rpartition(":")
    return int(version) if ours == run and version.isdigit() else None


@dataclass(slots=True)
class Answer:
    """The chunks of one sequence so far. Spans: `version` (a label), `start`, `end`, of tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    spans: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> int:
        """Tokens that came with it."""
        new = 0
        for choice in chunk["choices"]:
            ids = choice["token_ids"] or []
            content = (choice["logprobs"] or {}).get("content") or []
            new += len(ids)
            self.token_ids += ids
            self.logprobs += [each["logprob"] for each in content]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.spans += choice["weight_versions"] or []
        return new

    def completion(self, sibling: Sibling, url: str, run: str | None) -> Completion:
        """Args: run: whose weights they must be of; None while the server has its own, of no version.

        Raises:
            ServerGoneError: tokens of weights that are not ours: it was started anew, or somebody else loads its own.
            GenerationError: it ended for another reason than a stop token or its length, or is not whole, or no answer.
        """
        try:
            return self._completion(sibling, url, run)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            said = f"request {sibling.request.request_id!r}: {url} gave what is no answer"
            raise GenerationError(f"{said} ({type(error).__name__}: {error!s:.200})") from error

    def _completion(self, sibling: Sibling, url: str, run: str | None) -> Completion:
        name, count, end = sibling.request.request_id, len(self.token_ids), sibling.end
        if self.finish_reason not in ("stop", "length") and end is None:
            raise GenerationError(f"request {name!r}: {url} ended a sequence with {self.finish_reason!r}")
        if len(self.logprobs) != count:
            raise GenerationError(f"request {name!r}: {url} gave {count} tokens and {len(self.logprobs)} log-probs")
        with np.errstate(over="ignore"):
            logprobs = np.array(self.logprobs, np.float32)
        if not 1 <= count <= sibling.request.sampling.max_new_tokens or not np.isfinite(logprobs).all():
            raise GenerationError(f"request {name!r}: {url} gave {count} tokens, or log-probs that are no numbers")
        if min(self.token_ids) < 0:
            raise GenerationError(f"request {name!r}: {url} gave token {min(self.token_ids)}, which there is not")
        versions = np.full(count, NO_VERSION, np.int32)
        for span in self.spans if run is not None else ():
            version = version_in(span["version"], run or "")
            if version is None:
                raise ServerGoneError(foreign(url, span["version"]))
            versions[span["start"] : span["end"]] = version
        if run is not None and (versions == NO_VERSION).any():
            raise GenerationError(f"request {name!r}: {url} does not say of which weights all of its tokens are")
        return Completion(
            token_ids=np.array(self.token_ids, np.int32)[:end],
            logprobs=logprobs[:end],
            policy_versions=versions[:end],
            finish_reason=self.finish_reason if end is None else "stop",
        )


def foreign(url: str, label: str) -> str:
    return (
        f"{url} has other weights than it was given, labelled {label!r}: it was started anew, or another run loads its "
        "own into it. A server serves one run at a time"
    )
