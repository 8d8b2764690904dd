"""Turns `config.engine` into vLLM's own arguments; impossible settings are refused here, before a process is
started."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from transformers import AutoConfig, PreTrainedConfig
from vllm.config import WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.hints import nearest
from asyncrl.checks.installed_vllm import vllm_problem
from asyncrl.engines.vllm.gpu_memory import GIB, batched_tokens, kv_cache_bytes
from asyncrl.engines.vllm.names import BACKEND, EXTENSION
from asyncrl.engines.vllm.plugin import OWNER_VARIABLE
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

log = logging.getLogger(__name__)

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of vLLM's only attention on CPU; others fail deep inside its start."""
CPU_KV_MB = 256
CPU_ENVIRONMENT = {
    # Otherwise the log-prob helper is compiled at the first request: 12 s, with a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Binding would use core 0 for every engine on the machine, whatever else runs there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # All processes of an engine are on this machine; without these they would listen on the address of its host name.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def check_version() -> None:
    """Raises ConfigError unless this engine was tried with the installed version of vLLM."""
    problem = vllm_problem()
    if problem:
        raise ConfigError(problem)


def set_environment(tensor_parallel: int) -> None:
    """Set variables that vLLM's processes read; those that the user exported stay."""
    on_cpu = CPU_ENVIRONMENT if current_platform.is_cpu() else {}
    # A single worker on a CPU runs inside vLLM's engine process; two processes would only add a hop per step.
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if on_cpu and tensor_parallel == 1 else {}
    for name, value in {**ENVIRONMENT, **on_cpu, **alone}.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER_VARIABLE] = str(os.getpid())


def engine_args(config: Config) -> AsyncEngineArgs:
    """Build vLLM's arguments from ours, with `engine.vllm` on top.

    Raises:
        ConfigError: vLLM, the device or the model does not support the config; the message names the setting.
    """
    check_version()
    check_device(config)
    log.info("vLLM samples tokens with its own random generator: they do not depend on seed=%d", config.seed)
    own: dict[str, Any] = {
        "model": config.model.path,
        "dtype": with_dtypes(config, engine="cpu" if current_platform.is_cpu() else "cuda").engine.dtype,
        # A different seed for every engine: with the same one all workers would draw the same numbers in the same
        # order.
        "seed": secrets.randbits(31),
        "max_num_seqs": config.engine.max_sequences,
        "tensor_parallel_size": config.engine.tensor_parallel,
        # -1: the longest that fits the KV cache, limited by the model's own maximum.
        "max_model_len": config.engine.max_model_len or -1,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        # The default is before temperature, which is not the distribution that tokens are sampled from.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(MAX_LOGPROBS, config.engine.record_topk),
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    own |= adapter_args(config)
    if config.model.fp32_head:
        own["hf_overrides"] = {"head_dtype": "float32"}
    check_extra(config.engine.vllm, own)
    # By default vLLM uses Ray's executor in a placement group: see `checks.engine.engine_processes_are_its_own`.
    own["distributed_executor_backend"] = "uni" if config.engine.tensor_parallel == 1 else "mp"
    kv_mb = config.engine.kv_cache_mb
    if current_platform.is_cpu():
        check_memory(config)
        # Without a size vLLM takes 92 % of the machine's memory.
        own |= {"kv_cache_memory_bytes": (kv_mb or CPU_KV_MB) << 20, "enforce_eager": True}
    else:
        own |= gpu_args(config, own["dtype"], current_platform.get_device_total_memory())
    return AsyncEngineArgs(**own | dict(config.engine.vllm))


def gpu_args(config: Config, dtype: str, gpu_bytes: int) -> dict[str, Any]:
    """Arguments on GPUs of `gpu_bytes` each that `engine.vllm` may replace.

    Raises:
        ConfigError: see `kv_cache_bytes`, and `read_model_config`.
    """
    given: dict[str, Any] = {"max_num_batched_tokens": batched_tokens(config)}
    if config.engine.kv_cache_mb:
        return given | {"kv_cache_memory_bytes": config.engine.kv_cache_mb << 20}
    settings = read_model_config(config.model.path).to_dict()
    kv_bytes = None
    if "kv_cache_memory_bytes" not in config.engine.vllm:
        kv_bytes = kv_cache_bytes(config, settings, dtype, gpu_bytes)
    if kv_bytes is not None:
        log.info("vLLM gets %.1f GiB for keys and values: it shares its GPU", kv_bytes / GIB)
        given["kv_cache_memory_bytes"] = kv_bytes
    return given


MAX_LOGPROBS = 20
"""vLLM's own default limit."""


def check_memory(config: Config) -> None:
    """Check the memory before a start, which takes vLLM half a minute and which each restart of the worker would
    repeat."""
    wanted_mb = config.engine.kv_cache_mb * config.engine.tensor_parallel
    machine_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if wanted_mb > machine_mb:
        raise ConfigError(
            f"engine.kv_cache_mb={config.engine.kv_cache_mb} for each of engine.tensor_parallel="
            f"{config.engine.tensor_parallel} processes is more than the {machine_mb} MiB of this machine. Lower it"
        )


def adapter_args(config: Config) -> dict[str, Any]:
    """LoRA arguments: one slot for every version that a batch may still hold tokens of, and one for the incoming
    version.

    Raises:
        ConfigError: a rank that is larger than vLLM supports.
    """
    rank = config.model.lora_rank
    if rank == 0:
        return {}
    sizes = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not sizes:
        raise ConfigError(f"model.lora_rank={rank}: vLLM supports ranks up to {max(get_args(MaxLoRARanks))}. Lower it")
    return {"enable_lora": True, "max_lora_rank": min(sizes), "max_loras": config.replay.max_staleness + 2}


def check_extra(extra: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse arguments in `engine.vllm` that vLLM does not have, or that a setting of ours stands for."""
    known = {item.name for item in fields(AsyncEngineArgs)}
    for key in extra:
        if key in own:
            raise ConfigError(f"engine.vllm.{key} is set by asyncrl itself; see the other settings under engine")
        if key not in known:
            raise ConfigError(f"engine.vllm.{key}: vLLM has no such engine argument.{nearest(key, known)}")


def check_device(config: Config) -> None:
    device, cpu = config.engine.device, current_platform.is_cpu()
    if device.startswith("cuda:"):
        raise ConfigError(f"engine.device={device}: vLLM picks its own GPUs. Set CUDA_VISIBLE_DEVICES instead")
    if (device == "cuda" and cpu) or (device == "cpu" and not cpu):
        built = "a CPU" if cpu else "a GPU"
        raise ConfigError(f"engine.device={device}, but this vLLM was built for {built}. Use engine.device=auto")


def read_model_config(path: str) -> PreTrainedConfig:
    """Return the text config of the model that vLLM is going to serve.

    Raises:
        ConfigError: no config, or a head dimension that vLLM's attention does not support on this device.
    """
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path} has no config that transformers can read: {error}") from error
    head_dim = model.head_dim if hasattr(model, "head_dim") and model.head_dim else 0
    head_dim = head_dim or model.hidden_size // model.num_attention_heads
    if current_platform.is_cpu() and head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"model.path={path} has head_dim {head_dim}; vLLM on CPU has attention for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only. Use engine=transformers"
        )
    return model
