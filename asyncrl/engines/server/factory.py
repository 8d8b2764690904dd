"""Builds the server engine of the config, in the dialect of `engine.name`."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from asyncrl.checks.servers import refused
from asyncrl.engines.server.engine import ServerEngine
from asyncrl.engines.server.look import links_to
from asyncrl.engines.server.sglang_link import SglangLink
from asyncrl.engines.server.sglang_servers import SglangServers
from asyncrl.engines.server.vllm_link import VllmLink
from asyncrl.engines.server.vllm_servers import VllmServers
from asyncrl.errors import ConfigError
from asyncrl.schema import Config


def make_server_engine(config: Config) -> ServerEngine:
    """Raises ConfigError: an address that may not be used, or a server that does not support what the config asks
    for."""
    why = next(refused(config.engine), "")
    if why:
        raise ConfigError(why)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request
    if config.engine.name == "sglang":
        mine = hashlib.sha256(" ".join(sorted(config.engine.urls)).encode()).hexdigest()[:12]
        return SglangServers(config, links_to(config, SglangLink), Path(config.run.dir).absolute() / "sglang" / mine)
    return VllmServers(config, links_to(config, VllmLink))
