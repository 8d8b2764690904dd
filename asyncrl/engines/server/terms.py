"""Requirements on a vLLM server for rollouts, checked against what the server reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.checks.servers import ServerFacts
from asyncrl.engines.vllm.names import BACKEND, EXTENSION, PROTOCOL, SHAPE_KEYS

LOOK_TIMEOUT_S = 10.0
START_IT = (
    "Start it as docs/servers.md says: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out "
    '--logprobs-mode processed_logprobs --weight-transfer-config \'{"backend": "asyncrl"}\' '
    "--worker-extension-cls asyncrl.engines.vllm.plugin.WorkerExtension"
)


ALONE = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
NONE_OF = {
    "model_config": ("logits_processors", "quantization"),
    "speculative_config": (),
    "kv_transfer_config": (),
    "ec_transfer_config": (),
    "watermark_config": (),
    "lora_config": (),
}
"""Parts of vLLM's settings that must be empty, or whose listed keys must be: they would make log-probs or weights
differ from the recorded ones (`checks.engine` explains each for engine=vllm), or were never tried."""


def facts_of(settings: Mapping[str, Any]) -> ServerFacts:
    """Args: settings: `vllm_config` of /server_info."""
    return ServerFacts(
        max_length=int(settings["model_config"]["max_model_len"]),
        spared=1,
        width=int(settings["parallel_config"]["tensor_parallel_size"]),
        option="--max-model-len",
    )


def problems(version: str, settings: Mapping[str, Any], dtype: str) -> Iterator[str]:
    """Yield the reasons why this server cannot be used. Args: version: of vLLM. settings: as for `facts_of`. dtype:
    that the run expects engines to compute in, or empty."""
    model = settings["model_config"]
    if tuple(version.split(".")[:2]) != ("0", "32"):
        yield f"it runs vLLM {version}, but only 0.32 was tested. Start that version"
    backend = (settings.get("weight_transfer_config") or {}).get("backend")
    extension = settings["parallel_config"].get("worker_extension_cls")
    if backend != BACKEND or extension != EXTENSION:
        yield f"it cannot take weights from asyncrl (backend {backend!r}, worker extension {extension!r}). {START_IT}"
    if model["logprobs_mode"] != "processed_logprobs":
        yield (
            f"its --logprobs-mode is {model['logprobs_mode']}: log-probs before the temperature are not those that "
            "tokens are sampled with. Start it with --logprobs-mode processed_logprobs"
        )
    served = str(model["dtype"]).removeprefix("torch.")
    if dtype and served != dtype:
        yield f"it computes in {served}, but the run expects engines to compute in {dtype}. Set engine.dtype={served}"
    for key in ALONE:
        if settings["parallel_config"].get(key, 1) != 1:
            yield (
                f"its {key} is {settings['parallel_config'][key]}, but only --tensor-parallel-size was tested above "
                "1. Start it with 1"
            )
    for part, keys in NONE_OF.items():
        found = settings.get(part)
        for name, value in [(part, found)] if not keys else [(key, (found or {}).get(key)) for key in keys]:
            if value:
                yield f"it has a {name} ({value!s:.80}), and its log-probs or versions were never verified with that"


def differences(ours: Mapping[str, Any], answers: list[Any]) -> Iterator[str]:
    """Yield differences between our model's config (and our `vllm.receiver.SEAT`) and what the server's processes
    report. Keys missing in `ours` are not compared."""
    for answer in answers:
        protocol = answer.get("protocol") if isinstance(answer, Mapping) else None
        if protocol != PROTOCOL or answer.get("seat") != ours.get("seat", answer.get("seat")):
            yield "it has another version of asyncrl than this process. Install the same on both, and restart it"
            return
        for key in SHAPE_KEYS:
            if key in ours and answer.get(key) != ours[key]:
                yield (
                    f"it serves a model with {key}={answer.get(key)}, but model.path has {ours[key]}. Start it with "
                    "the model of model.path, or name another server"
                )
                return
