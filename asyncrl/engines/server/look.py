"""Connections to a run's servers, in the dialect of `engine.name`, and a check of them before the run starts. Without
torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from asyncrl.checks.machine import model_settings
from asyncrl.checks.servers import connected_at, too_short
from asyncrl.engines.server.answers import ServerGoneError
from asyncrl.engines.server.link import ServerLink
from asyncrl.engines.server.sglang_link import SglangLink
from asyncrl.engines.server.vllm_link import VllmLink
from asyncrl.engines.vllm.names import SHAPE_KEYS
from asyncrl.errors import ConfigError
from asyncrl.schema import Config

Link = TypeVar("Link", VllmLink, SglangLink)


def sglang_links(config: Config) -> list[SglangLink]:
    return links_to(config, SglangLink)


def links_to(config: Config, kind: Callable[..., Link]) -> list[Link]:
    """Return one link for each of `engine.urls`, with the run's key."""
    engine = config.engine
    key = os.environ.get(engine.key_env, "") if engine.key_env else ""
    return [kind(url, base_url=connected_at(url), key=key, timeout_s=config.weights.timeout_s) for url in engine.urls]


def look_at_servers(config: Config) -> None:
    """Check the servers before a run is started. Raises ConfigError: one cannot be used, or none answers."""
    links = sglang_links(config) if config.engine.name == "sglang" else links_to(config, VllmLink)
    # From `config.json`: loading transformers' own defaults takes seconds, and a worker checks them.
    said = model_settings(config.model.path)
    shape = {key: said[key] for key in SHAPE_KEYS if said.get(key) is not None}

    async def look(link: ServerLink) -> str:
        dtype = "" if config.engine.dtype == "auto" else config.engine.dtype
        try:
            facts = await link.facts(dtype, shape)
        except ServerGoneError as error:
            return str(error)
        finally:
            await link.close()
        if why := too_short(link.url, facts, config):
            raise ConfigError(why)
        return ""

    async def look_at_all() -> list[str]:
        return list(await asyncio.gather(*map(look, links)))

    silent = asyncio.run(look_at_all())
    if silent and all(silent):
        raise ConfigError(
            f"no server of engine.urls answers: {'; '.join(silent)}. Is the address right, and the server up? "
            f"{links[0].start_it}"
        )
