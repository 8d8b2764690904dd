"""Builds an engine from the config. A new engine is one file and one line here."""

from __future__ import annotations

import hashlib
import importlib
import logging
from pathlib import Path

import torch

from asyncrl.checks.dtypes import with_dtypes
from asyncrl.checks.servers import SERVERS, refused
from asyncrl.engines.base import Engine
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.hf.engine import TransformersEngine
from asyncrl.engines.hf.runner import ModelRunner
from asyncrl.engines.server.engine import ServerEngine
from asyncrl.engines.server.look import links_to, sglang_links
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.engines.server.vllm_link import VllmLink
from asyncrl.engines.server.vllm_servers import VllmServers
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def engine_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is the first GPU if there is one.

    Raises:
        ConfigError: a GPU is asked for where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device=cuda, but torch sees no GPU here. Use engine.device=auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def make_engine(config: Config) -> Engine:
    """Build the engine of `config.engine`, with the weights of `config.model.path` and no version yet.

    Raises:
        ConfigError: unknown engine or dtype, or a model that the engine cannot batch.
    """
    engine = config.engine
    if engine.name == "fake":
        return FakeEngine()
    if engine.name == "vllm":
        # Imported here: vLLM is an optional package, and takes seconds to import.
        module = "asyncrl.engines.vllm.lora" if config.model.lora_rank > 0 else "asyncrl.engines.vllm.engine"
        return importlib.import_module(module).make_vllm_engine(config)
    if engine.name in SERVERS:
        return make_server_engine(config)
    if engine.name != "transformers":
        raise ConfigError(
            f"engine.name={engine.name!r} is unknown; it is one of vllm, transformers, server, sglang, fake"
        )
    device = engine_device(engine.device)
    engine = with_dtypes(config, engine=device.type).engine
    if engine.dtype not in _DTYPES:
        raise ConfigError(f"engine.dtype={engine.dtype!r} is unknown; it is one of {', '.join(_DTYPES)}")
    log.info("the built-in engine computes on %s in %s", device, engine.dtype)
    runner = ModelRunner.from_pretrained(
        config.model.path,
        _DTYPES[engine.dtype],
        device,
        engine.max_sequences,
        adapters=config.model.lora_rank > 0,
        fp32_head=config.model.fp32_head,
    )
    recompute = config.weights.on_update == "recompute"
    return TransformersEngine(runner, threads=engine.threads, recompute=recompute)


def make_server_engine(config: Config) -> ServerEngine:
    """Raises ConfigError: an address that may not be used, or a server that does not support what the config asks
    for."""
    why = next(refused(config.engine), "")
    if why:
        raise ConfigError(why)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request
    if config.engine.name == "sglang":
        mine = hashlib.sha256(" ".join(sorted(config.engine.urls)).encode()).hexdigest()[:12]
        return SglangServers(config, sglang_links(config), Path(config.run.dir).absolute() / "sglang" / mine)
    return VllmServers(config, links_to(config, VllmLink))
