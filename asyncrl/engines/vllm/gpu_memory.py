"""How much memory vLLM gets for keys and values on a GPU that it shares.

vLLM measures what it needs by the free memory of the whole GPU. What another process allocates while it starts, such as
a learner on the same GPU, counts as vLLM's own need, and its KV cache is that much smaller for the whole run. So beside
others the cache is computed from the engine's share, and vLLM is told its size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.errors import ConfigError
from asyncrl.placement import WHOLE_SHARE
from asyncrl.schema import Config

GIB = 1 << 30
FIXED = 2 * GIB
"""CUDA context, captured graphs, buffers of NCCL, and the pieces of a weight update under way."""
BATCHED_TOKENS = 8192
"""Tokens of prompts and samples in one forward: what vLLM's server takes. An engine in another process than the server
gets 2,048, in which prompts of 8 k tokens are prefilled in four steps."""
WIDTH = {"float32": 4, "bfloat16": 2}


def batched_tokens(config: Config) -> int:
    """Return vLLM's `max_num_batched_tokens`, unless the user sets it. It is never below the number of sequences."""
    return max(BATCHED_TOKENS, config.engine.max_sequences)


def kv_cache_bytes(config: Config, settings: Mapping[str, Any], dtype: str, gpu_bytes: int) -> int | None:
    """Return the bytes of each GPU for keys and values, where the engine shares its GPUs. None where it has them for
    itself, or where the size of the model is not known: then vLLM measures.

    Args:
        settings: config of the model's decoder (`hidden_size`, `vocab_size` ...).
        dtype: `float32` or `bfloat16`, of the engine.
        gpu_bytes: memory of a GPU.

    Raises:
        ConfigError: the model does not fit the engine's share.
    """
    share = config.engine.vllm.get("gpu_memory_utilization")
    parameters = parameters_in(Path(config.model.path))
    if share is None or share >= WHOLE_SHARE or not parameters:
        return None
    parallel = config.engine.tensor_parallel
    weights = math.ceil(parameters * WIDTH[dtype] / parallel)
    working = working_bytes(config, settings, WIDTH[dtype])
    left = int(share * gpu_bytes) - weights - working
    if left <= 0:
        raise ConfigError(
            f"{config.model.path} does not fit into engine.vllm.gpu_memory_utilization={share:g} of a GPU of "
            f"{gpu_bytes / GIB:.0f} GiB: {weights / GIB:.1f} GiB of weights and {working / GIB:.1f} GiB to compute "
            "with leave nothing for keys and values. Give engines GPUs of their own (placement.mode=dedicated), "
            "raise "
            "engine.tensor_parallel, or lower engine.vllm.max_num_batched_tokens"
        )
    return left


def working_bytes(config: Config, settings: Mapping[str, Any], width: int) -> int:
    """Bytes of a GPU for everything but weights, keys and values: the tensors of one layer at a full batch, the logits
    of all sequences (also in float32, as log-probs, and sorted), the largest tensor of a weight update, and FIXED."""
    parallel = config.engine.tensor_parallel
    hidden, vocabulary = int(settings["hidden_size"]), int(settings["vocab_size"])
    inner = int(settings.get("intermediate_size") or 4 * hidden)
    chosen = int(settings.get("num_experts_per_tok") or 1)
    tokens = int(config.engine.vllm.get("max_num_batched_tokens") or batched_tokens(config))
    layer = tokens * (6 * hidden + 3 * inner * chosen // parallel) * width
    logits = config.engine.max_sequences * vocabulary * (width + 3 * 4)
    return layer + logits + vocabulary * hidden * width + FIXED


def parameters_in(folder: Path) -> int:
    """Number of parameters in the safetensors of a local folder, by their headers; 0 if there are none."""
    try:
        return sum(math.prod(shape) for file in sorted(folder.glob("*.safetensors")) for shape in _shapes(file))
    except (OSError, SafetensorError, struct.error):  # vLLM, which reads them next, says what is wrong with them
        return 0


def _shapes(file: Path) -> Iterator[list[int]]:
    with safe_open(file, framework="np") as held:
        for name in held.keys():  # noqa: SIM118  (it is no dict)
            yield held.get_slice(name).get_shape()
