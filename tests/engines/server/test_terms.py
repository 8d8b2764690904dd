"""Servers that cannot be used are refused by what they report, with what to do."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.checks.servers import connected_at
from asyncrl.engines.server.terms import differences, facts_of, problems
from asyncrl.engines.vllm.names import BACKEND, EXTENSION, PROTOCOL, shape_of

SETTINGS: dict[str, Any] = {
    "model_config": {
        "max_model_len": 64,
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
        "logits_processors": None,
        "quantization": None,
    },
    "parallel_config": {"tensor_parallel_size": 2, "worker_extension_cls": EXTENSION, "pipeline_parallel_size": 1},
    "weight_transfer_config": {"backend": BACKEND},
    "speculative_config": None,
    "lora_config": None,
}


def changed(*path: str, to: Any) -> dict[str, Any]:
    settings = copy.deepcopy(SETTINGS)
    inner = settings
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return settings


def test_a_server_as_the_page_says_is_taken():
    facts = facts_of(SETTINGS)
    assert list(problems("0.32.1", SETTINGS, "float32")) == [] and list(problems("0.32.1", SETTINGS, "")) == []
    assert (facts.width, facts.max_length) == (2, 64)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (changed("weight_transfer_config", to=None), "cannot take weights from asyncrl (backend None"),
        (changed("parallel_config", "worker_extension_cls", to=""), "--worker-extension-cls"),
        (changed("model_config", "logprobs_mode", to="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        (changed("model_config", "dtype", to="torch.bfloat16"), "Set engine.dtype=bfloat16"),
        (changed("parallel_config", "pipeline_parallel_size", to=2), "its pipeline_parallel_size is 2"),
        (changed("speculative_config", to={"method": "ngram"}), "has a speculative_config"),
        (changed("lora_config", to={"max_loras": 1}), "has a lora_config"),
        (changed("model_config", "quantization", to="fp8"), "has a quantization (fp8)"),
    ],
)
def test_one_that_cannot_be_used_is_told_why(settings, said):
    (why,) = problems("0.32.0", settings, "float32")
    assert said in why


def test_another_version_of_vllm_cannot_be_used():
    (why,) = problems("0.33.0", SETTINGS, "float32")
    assert "runs vLLM 0.33.0, but only 0.32" in why


def test_another_model_and_another_asyncrl_are_told_apart():
    config = SimpleNamespace(vocab_size=320, hidden_size=64)
    ours = shape_of(config) | {"seat": ["host", "port"]}
    assert list(differences(ours, [ours | {"protocol": PROTOCOL}])) == []
    (why,) = differences(ours, [ours | {"protocol": PROTOCOL, "vocab_size": 384}])
    assert "vocab_size=384, but model.path has 320" in why
    for answer in (None, {}, ours | {"protocol": PROTOCOL + 1}, ours | {"protocol": PROTOCOL, "seat": ["host"]}):
        (why,) = differences(ours, [answer])
        assert "another version of asyncrl" in why


def test_what_was_judged_is_what_is_connected_to():
    assert connected_at("http://localhost:8000") in ("http://127.0.0.1:8000", "http://[::1]:8000")
    assert connected_at("http://[::1]:8000") == "http://[::1]:8000"
    assert connected_at("https://localhost:8000") == "https://localhost:8000"
