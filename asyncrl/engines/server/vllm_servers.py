"""vLLM servers: each is a member of the weight group, and stages a version while it generates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from asyncrl.engines.server.engine import REJECTED_S, ServerEngine
from asyncrl.engines.server.receiver import ServersReceiver, StagedInServers
from asyncrl.engines.server.terms import START_IT
from asyncrl.engines.server.vllm_link import VllmLink
from asyncrl.errors import ConfigError
from asyncrl.schema import Config


class VllmServers(ServerEngine):
    """Implements `engines.base.Engine`, `OwnProcesses` and `Several`."""

    start_it = START_IT

    def __init__(self, config: Config, links: Sequence[VllmLink]) -> None:
        self._links = {link.url: link for link in links}
        super().__init__(config, links)
        self._parts = self._parameters.outlines()
        """Tensors of which processes need only parts."""

    def receiver(self) -> ServersReceiver:
        return ServersReceiver(
            self._there, self._call_workers, self._report_lost, self._report_broken_join, self._parts
        )

    def load_weights(self, policy_version: int, tensors: Any) -> None:
        if not isinstance(tensors, StagedInServers):
            raise ConfigError("engine=server takes weights only with weights.transport=broadcast. Set that")
        self._parameters.check(tensors.shapes)
        self._load(policy_version, tensors.urls)

    def _report_lost(self, url: str, why: str) -> None:
        """Mark a server as lost, from another thread."""
        self._loop.call(self._lose(self._servers[url], why), self._timeout_s)

    def _report_broken_join(self, urls: Sequence[str], why: str) -> None:
        """Handle a group that did not form. If some servers served before, the new ones are considered the cause and
        left alone for a while: with them there would be no update any more."""
        servers = [self._servers[url] for url in urls]
        if any(server.serves for server in servers):
            for server in servers:
                if not server.serves:
                    server.not_before = time.monotonic() + REJECTED_S
                    self._report_lost(server.url, f"{server.url} did not join the weight group: {why}")

    def _there(self) -> dict[str, tuple[int, int]]:
        servers = self._servers.items()
        return {url: (server.facts.width, server.arrivals) for url, server in servers if server.facts is not None}

    def _call_workers(self, url: str, method: str, *arguments: Any) -> list[Any]:
        return self._loop.call(self._links[url].call_workers(method, arguments), 2 * self._timeout_s)
