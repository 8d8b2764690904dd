"""Checks the addresses of inference servers started outside asyncrl (`engine=server`, `engine=sglang`)."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from asyncrl.checks.addresses import is_private, resolved
from asyncrl.schema import Config, EngineConfig

SERVERS = ("server", "sglang")
"""Values of `engine.name` that use servers."""
PROBE_TOKENS = 24
"""Tokens of one of the canary's probes. A server must hold more: none scores without generating a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server reports about itself. Raises ValueError if it could hold no sequence."""

    max_length: int
    """Tokens of prompt and completion together."""
    spared: int
    """How many of `max_length` a prompt must leave free."""
    width: int
    """Number of processes that hold the model."""
    option: str
    """The option that sets its length."""
    option_adds: int = 0
    """How much more than `max_length` that option must be."""

    def __post_init__(self) -> None:
        if self.max_length < 1 or self.width < 1:
            raise ValueError("no room for a sequence")

    def to_hold(self, tokens: int) -> str:
        """Return the option with which it holds as many."""
        return f"{self.option} {tokens + self.option_adds}"


def too_short(url: str, facts: ServerFacts, config: Config, beside: int = 0) -> str:
    """Why such a server cannot be used by a run of this config; empty where it can.

    Args:
        beside: what the servers hold that the run goes on with.
    """
    prompt, new = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    free, probe = prompt + facts.spared, PROBE_TOKENS + facts.spared
    wanted = {
        f"data.max_prompt_tokens={prompt} + rollout.max_new_tokens={new} = {prompt + new}": prompt + new,
        f"the canary takes {probe}": probe,
        f"requests may have {beside}": beside,
        f"a prompt of data.max_prompt_tokens={prompt} takes {free}": free,
    }
    what, most = max(wanted.items(), key=lambda item: item[1])
    if facts.max_length >= most:
        return ""
    return (
        f"engine.urls: {url} cannot be used: it holds {facts.max_length} tokens, and {what}. Start it with "
        f"{facts.to_hold(most)}"
    )


def refused(engine: EngineConfig) -> Iterator[str]:
    """Report why these `engine.urls` cannot be used."""
    if not engine.urls:
        yield f"engine={engine.name} needs the addresses of its servers. Set engine.urls=[http://127.0.0.1:8000]"
    wrong = [why for url in engine.urls for why in _wrong(url)]
    yield from wrong
    if not wrong and len({urlsplit(connected_at(url)).netloc.lower() for url in engine.urls}) != len(engine.urls):
        yield f"engine.urls names a server twice: {', '.join(engine.urls)}. Name each once"
    key = os.environ.get(engine.key_env, "") if engine.key_env else ""
    if engine.key_env and not key:
        yield f"engine.key_env={engine.key_env} names an environment variable that is not set. Export it"
    if not key.isascii() or not key.isprintable():  # an error about an invalid header would show the key
        yield (
            f"the key in {engine.key_env} has a line break, or a character that a header cannot have. Export it without"
        )


def _wrong(url: str) -> Iterator[str]:
    if "@" in url:
        yield "engine.urls: an address contains a name or password, which every log would show. Use engine.key_env"
        return
    try:
        place = urlsplit(url)
        port = place.port
    except ValueError:
        place, port = urlsplit(""), None
    extra = place.query or place.fragment or place.path not in ("", "/")
    if place.scheme not in ("http", "https") or not place.hostname or port is None or extra:
        yield (
            f"engine.urls: {url!r} is not of the form http://HOST:PORT. Write each server like that, with nothing "
            "after the port"
        )
        return
    if not resolved(place.hostname):
        yield f"engine.urls: {place.hostname!r} cannot be resolved here. Check the name, or give an IP address"
    elif not is_private(place.hostname):
        yield (
            f"engine.urls: {url} is neither on this machine nor in a private network. Whoever reaches that port can "
            "load weights and call into its workers, because no key protects vLLM's developer mode. Use a private "
            "address, or a tunnel that ends on 127.0.0.1"
        )


def on_to_servers(engine: EngineConfig) -> str:
    """Return how a worker passes weights on to its servers, for a line about the weights; empty where it does not."""
    return ", then to each server by a file in run.dir" if engine.name == "sglang" else ""


def connected_at(url: str) -> str:
    """Return `url` with the IP address that was checked, whatever the name resolves to later. With https the name is
    kept, because a certificate needs it."""
    place = urlsplit(url)
    found = resolved(place.hostname or "")
    if place.scheme == "https" or not found:
        return url
    host = f"[{found[0]}]" if isinstance(found[0], ipaddress.IPv6Address) else str(found[0])
    return f"http://{host}:{place.port}"
