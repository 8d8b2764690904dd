"""Tokens get the versions that the server reports, and versions that this run did not load are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.engines.server.answers import Answer, ServerGoneError, generation_body, label_of, version_in
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import GenerationError
from asyncrl.types import NO_VERSION
from tests.engines.models import request

RUN, URL = "0a1b", "http://127.0.0.1:8000"
SIBLING = Sibling(request(np.array([3, 4], np.int32), new=9), 0, 0)


def chunk(*tokens: int, reason: str | None = None, spans: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -token / 10, "top_logprobs": []} for token in tokens]
    choice = {"token_ids": list(tokens), "finish_reason": reason, "weight_versions": spans}
    return {"choices": [choice | {"logprobs": {"content": content}}]}


def span(label: str, start: int, end: int) -> dict[str, Any]:
    return {"version": label, "start": start, "end": end}


def answered(*spans: dict[str, Any], reason: str = "length") -> Answer:
    answer = Answer()
    assert answer.add(chunk(5)) == 1 and answer.add(chunk(6, 7, reason=reason, spans=list(spans))) == 2
    assert answer.add({"choices": []}) == 0
    return answer


def test_a_sequence_that_spans_an_update_has_both_versions():
    answer = answered(span(f"{RUN}:3", 0, 1), span(f"{RUN}:4", 1, 3))
    completion = answer.completion(SIBLING, URL, RUN)
    assert completion.policy_versions.tolist() == [3, 4, 4] and completion.token_ids.tolist() == [5, 6, 7]
    np.testing.assert_allclose(completion.logprobs, [-0.5, -0.6, -0.7], rtol=1e-6)


@pytest.mark.parametrize("label", ["default", "3", "0a1c:3", f"{RUN}:", f"{RUN}:-1"])
def test_tokens_of_weights_that_are_not_ours_are_none(label):
    with pytest.raises(ServerGoneError, match="other weights than it was given"):
        answered(span(f"{RUN}:3", 0, 1), span(label, 1, 3)).completion(SIBLING, URL, RUN)


def test_a_sequence_that_is_not_whole_is_none():
    with pytest.raises(GenerationError, match="which weights all"):
        answered(span(f"{RUN}:3", 0, 2)).completion(SIBLING, URL, RUN)
    with pytest.raises(GenerationError, match="'abort'"):
        answered(span(f"{RUN}:3", 0, 3), reason="abort").completion(SIBLING, URL, RUN)
    answer = answered(span(f"{RUN}:3", 0, 3))
    answer.logprobs.pop()
    with pytest.raises(GenerationError, match="3 tokens and 2 log-probs"):
        answer.completion(SIBLING, URL, RUN)


def test_before_a_first_load_tokens_are_of_no_version():
    versions = answered(span("default", 0, 3)).completion(SIBLING, URL, None).policy_versions
    assert versions.tolist() == [NO_VERSION] * 3


def test_what_came_after_the_end_by_text_is_cut_off():
    sibling = Sibling(SIBLING.request, 0, 1, end=2)
    completion = answered(span(f"{RUN}:3", 0, 3), reason="abort").completion(sibling, URL, RUN)
    assert (completion.token_ids.tolist(), completion.finish_reason) == ([5, 6], "stop")


def test_labels_say_run_and_version_and_requests_have_no_seed():
    assert version_in(label_of(RUN, 12), RUN) == 12 and version_in(label_of(RUN, 12), "ffff") is None
    sampling = generation_body(SIBLING, "a.0", "salt")["sampling_params"]
    assert "seed" not in sampling and sampling["logprobs"] == 0 and sampling["max_tokens"] == 9


def test_more_tokens_than_were_asked_for_none_at_all_and_log_probs_that_are_no_numbers_are_no_answer():
    short = Sibling(request(np.array([3, 4], np.int32), new=2), 0, 0)
    with pytest.raises(GenerationError, match="gave 3 tokens"):
        answered(span(f"{RUN}:3", 0, 3)).completion(short, URL, RUN)
    with pytest.raises(GenerationError, match="gave 0 tokens"):
        Answer(finish_reason="stop").completion(SIBLING, URL, RUN)
    answer = answered(span(f"{RUN}:3", 0, 3))
    answer.logprobs[1] = float("nan")
    with pytest.raises(GenerationError, match="not finite numbers"):
        answer.completion(SIBLING, URL, RUN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", [None, -0.2, -0.3]),
        ("logprobs", [-1e300, -0.2, -0.3]),
        ("token_ids", [-1, 6, 7]),
        ("token_ids", [1 << 40, 6, 7]),
        ("token_ids", [[5], 6, 7]),
        ("spans", [{"version": 3, "start": 0, "end": 3}]),
        ("spans", [{"version": f"{RUN}:3", "start": "0", "end": 3}]),
        ("spans", ["x"]),
    ],
)
def test_what_is_no_answer_fails_its_sequence_and_ends_nobody(name, value):
    answer = answered(span(f"{RUN}:3", 0, 3))
    setattr(answer, name, value)
    with pytest.raises(GenerationError, match=f"{URL} (gave|sent)"):
        answer.completion(SIBLING, URL, RUN)
