"""Turns one sibling of a group into a vLLM request, and the answer into a `Completion`."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSampling

from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import GenerationError
from asyncrl.types import NO_VERSION, TOPK_IDS, TOPK_LOGPROBS, Completion

_FIRST_AND_LAST = 1 << 30
"""Tokens between two outputs: the first output reports the start of a sequence, the next its end."""


def sampling_of(sibling: Sibling) -> VllmSampling:
    """Return vLLM's sampling parameters. They have no seed: tokens are drawn from the engine's own generator.

    A seed gives a request a torch generator, which vLLM winds back (`set_offset`) after each step that has prefilled
    only a part of its prompt. torch's CPU generator has no offset: the engine process ends. Prompts are whole in one
    step only without chunked prefill, which vLLM supports for no model that generates (0.32, its own warning).
    """
    sampling = sibling.request.sampling
    return VllmSampling(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(sampling.stop_token_ids),
        # The model's end-of-sequence token is in `stop_token_ids` already, and only the tokens there may stop.
        ignore_eos=True,
        logprobs=sampling.record_topk,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        # With stop texts every token is checked.
        stream_interval=1 if sampling.stop else _FIRST_AND_LAST,
    )


def scoring() -> VllmSampling:
    """Sampling parameters for teacher-forced log-probs of a prompt. The prefix cache is not read: it holds no
    log-probs."""
    return VllmSampling(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(sibling: Sibling, output: CompletionOutput) -> Completion:
    """Build the completion. Raises GenerationError if vLLM ended it for another reason than a stop token or its length.

    Tokens sampled after a stop text, before vLLM was told to abort, are cut off.
    """
    name, end = sibling.request.request_id, sibling.end
    if output.finish_reason not in ("stop", "length") and end is None:
        raise GenerationError(f"request {name!r}: vLLM ended a sequence with {output.finish_reason!r}")
    count = len(output.token_ids)
    logprobs: Any = output.logprobs
    versions = np.full(count, NO_VERSION, np.int32)
    for span in output.weight_versions or []:
        if span.version.lstrip("-").isdigit():  # vLLM's own label before the first load is a word
            versions[span.start : span.end] = int(span.version)
    if logprobs is None or len(logprobs) != count:
        raise GenerationError(f"request {name!r}: vLLM gave {count} tokens and another number of log-probs")
    starts = np.array(logprobs.start_indices, np.int64)  # the sampled token comes first at each position
    return Completion(
        token_ids=np.array(output.token_ids, np.int32)[:end],
        logprobs=np.array(logprobs.logprobs, np.float32)[starts][:end],
        policy_versions=versions[:end],
        finish_reason=str(output.finish_reason) if end is None else "stop",
        recorded=topk_of(logprobs, sibling.request.sampling.record_topk, end),
    )


def topk_of(logprobs: Any, k: int, end: int | None) -> dict[str, np.ndarray]:
    """`TOPK_IDS` and `TOPK_LOGPROBS` [N, k]: after the sampled token of each position vLLM lists the k most likely,
    repeating the sampled one if it is among them."""
    if k == 0:
        return {}
    wanted = {TOPK_IDS: (logprobs.token_ids, np.int32), TOPK_LOGPROBS: (logprobs.logprobs, np.float32)}
    return {
        name: np.array(values, dtype).reshape(len(logprobs), k + 1)[:end, 1:]
        for name, (values, dtype) in wanted.items()
    }


def scores_of(output: RequestOutput, length: int) -> np.ndarray:
    """Return [length - 1] float32 log-probs."""
    scores: Any = output.prompt_logprobs
    found = scores.logprobs if scores is not None else []
    if len(found) != length - 1:
        raise GenerationError(f"vLLM scored {len(found)} of {length - 1} tokens")
    return np.array(found, np.float32)
