"""Builds a server's request for one sequence, and turns its answer into a `Completion`. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import EngineDiedError, GenerationError
from asyncrl.types import NO_VERSION, Completion

TOLD_EVERY = 64
"""Tokens per chunk; the worker sees each chunk as progress."""


class ServerGoneError(EngineDiedError):
    """This server does not answer, or no longer serves the weights that it was given; other servers may."""


def generation_body(sibling: Sibling, name: str, salt: str) -> dict[str, Any]:
    """Return the body of a request, as `vllm.requests.sampling_of` in the server's format; without a seed, for the
    reason given there."""
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
    """Label of the weights that one engine of this run loads; no other run and no restarted server has the same."""
    return f"{run}:{policy_version}"


def version_in(label: str, run: str) -> int | None:
    """Version in the label; None if the weights are not from this run."""
    ours, _, version = label.rpartition(":")
    return int(version) if ours == run and version.isdigit() else None


@dataclass(slots=True)
class Answer:
    """The chunks of one sequence so far. A span covers tokens `start` to `end` of one `version` (a label)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    spans: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, chunk: Mapping[str, Any]) -> int:
        """Append a chunk; returns the number of new tokens."""
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
        """Return the completion. Args: run: the run whose weights must have sampled it; None while the server has its
        own weights, of no version.

        Raises:
            ServerGoneError: tokens of foreign weights: the server was restarted, or another run loads weights into it.
            GenerationError: it ended for another reason than a stop token or its length, or is incomplete or malformed.
        """
        try:
            return self._completion(sibling, url, run)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            said = f"request {sibling.request.request_id!r}: {url} sent an invalid answer"
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
            raise GenerationError(
                f"request {name!r}: {url} gave {count} tokens, or log-probs that are not finite numbers"
            )
        if min(self.token_ids) < 0:
            raise GenerationError(f"request {name!r}: {url} gave token {min(self.token_ids)}, which does not exist")
        versions = np.full(count, NO_VERSION, np.int32)
        for span in self.spans if run is not None else ():
            version = version_in(span["version"], run or "")
            if version is None:
                raise ServerGoneError(foreign(url, span["version"]))
            versions[span["start"] : span["end"]] = version
        if run is not None and (versions == NO_VERSION).any():
            raise GenerationError(f"request {name!r}: {url} does not say which weights all of its tokens are from")
        return Completion(
            token_ids=np.array(self.token_ids, np.int32)[:end],
            logprobs=logprobs[:end],
            policy_versions=versions[:end],
            finish_reason=self.finish_reason if end is None else "stop",
        )


def foreign(url: str, label: str) -> str:
    return (
        f"{url} has other weights than it was given, labelled {label!r}: it was restarted, or another run loads "
        "its weights into it. A server serves one run at a time"
    )
