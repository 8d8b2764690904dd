"""Several servers as one engine: requests are routed between them, and each receives the weights itself.

    generate   a group and an episode's turns go to the server that holds their prefix (`router.py`)
    load       each for itself (`link.ServerLink.load`)
    lost       its running sequences are sampled again by the others; once it is back it first gets the weights

A token's version is what the server reports, by labels that no other run has: tokens of any other weights are sampled
again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.checks.dtypes import dtype_on
from asyncrl.checks.servers import ServerFacts, too_short
from asyncrl.engines.base import GenerateRequest
from asyncrl.engines.parameters import ParameterTable
from asyncrl.engines.request_check import check_request
from asyncrl.engines.server.answers import Answer, ServerGoneError, foreign, label_of, version_in
from asyncrl.engines.server.link import SILENT_S, Load, ServerLink
from asyncrl.engines.server.router import Router
from asyncrl.engines.server.servers import Server
from asyncrl.engines.server.terms import LOOK_TIMEOUT_S
from asyncrl.engines.vllm.names import shape_of
from asyncrl.engines.vllm.receiver import SEAT
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.errors import ConfigError, EngineDiedError, GenerationError
from asyncrl.loops import LoopThread, together
from asyncrl.schema import Config
from asyncrl.types import NO_VERSION, Completion

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two checks of each server."""
HEED = 0.05
"""Weight of one check in the moving average of the load by others, which spans some 40 s. If workers used the last
check alone, they would all leave the same server together, and return together."""
REJECTED_S = 300.0
"""Seconds until a server that did not join the weight group is asked again."""
PATIENCE_S = 240.0
"""Longest wait in seconds for any server, at the start and while none is left."""
MOST_AGAIN = 8
"""How often a sequence may return with another version than it was sent under, each of which needs a load in between;
and how often it may lose its server: a request that every server answers with status 500 would otherwise lose them all
for ever."""


class ServerEngine(ABC):
    """Implements `engines.base.Engine` and `Several`, except how weights reach the servers."""

    start_it: str
    """Text for users: how a server of this kind is started."""

    def __init__(self, config: Config, links: Sequence[ServerLink]) -> None:
        self._config = config
        self._recompute = config.weights.on_update == "recompute"
        self._timeout_s = config.weights.timeout_s
        # Shorter than the worker's wait for a token, which would end without mentioning servers.
        self._without_s = 0.4 * config.replay.wait_timeout_s
        self._dtype = dtype_on(config.engine.dtype, "cuda" if torch.cuda.is_available() else "cpu")
        model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
        self._shape = shape_of(model) | {"seat": SEAT}
        self._vocabulary = int(model.get_text_config(decoder=True).vocab_size)
        with torch.device("meta"):
            self._parameters = ParameterTable(AutoModelForCausalLM.from_config(model))
        self._run = secrets.token_hex(8)
        self._policy_version = NO_VERSION
        self._loading = False
        self._numbers = itertools.count()
        self._counts = dict.fromkeys(("requests", "loads", "restarted", "lost_servers", "generated_tokens"), 0)
        self._seconds = {"load_s": 0.0, "stall_s": 0.0}
        self._servers = {link.url: Server(link, config.engine.max_sequences) for link in links}
        self._router = Router(list(self._servers))
        self._changed = asyncio.Condition()
        self._shortest: ServerFacts | None = None
        """Of the servers that the engine started with, the one that holds the shortest sequences."""
        self._closed = False
        self._loop = LoopThread("servers")
        self._loop.begin(self._start(), PATIENCE_S + 4 * self._timeout_s)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together, on every server; one that holds fewer is refused when it arrives
        later."""
        return self._shortest.max_length if self._shortest else 0

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self._closed:
            raise GenerationError("the engine is closed; make a new one")
        holds = self._shortest
        assert holds is not None
        longer = holds.to_hold(len(request.prompt_ids) + request.sampling.max_new_tokens)
        or_else = f", or start the servers with {longer}"
        check_request(request, self._vocabulary, holds.max_length, spared=holds.spared, or_else=or_else)
        return await asyncio.wrap_future(self._loop.submit(self._generate(request)))

    @abstractmethod
    def load_weights(self, policy_version: int, tensors: Any) -> None:
        """See `Engine.load_weights`."""

    def _load(self, policy_version: int, urls: Sequence[str], path: str = "") -> None:
        """Make the servers serve the weights in `path`, or those staged on them, from now on.

        Raises:
            EngineDiedError: no server does.
        """
        started = time.monotonic()
        self._loop.call(self._commit(policy_version, urls, path), 5 * self._timeout_s)
        self._counts["loads"] += 1
        self._seconds["load_s"] += time.monotonic() - started

    async def _arrived(self, server: Server) -> None:
        """Called when a server has arrived, with weights of its own."""
        async with self._changed:
            self._changed.notify_all()

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Scores of one of the servers; see `Engine.score`."""
        return self.score_everywhere(sequences)[0]

    def score_everywhere(self, sequences: Sequence[NDArray[np.int32]]) -> list[list[NDArray[np.float32]]]:
        """Scores of each server. Raises EngineDiedError: no server is left that could."""

        async def score(server: Server) -> list[NDArray[np.float32]]:
            names = [f"score.{self._run}.{next(self._numbers)}" for _ in sequences]
            return list(await asyncio.gather(*map(server.link.score, sequences, names)))

        return self._loop.call(self._on_all(list(self._usable()), score), 10 * self._timeout_s)

    def stats(self) -> dict[str, float]:
        servers = self._servers.values()
        return {
            "running": float(sum(server.queue.in_flight for server in servers)),
            "waiting": float(sum(server.queue.waiting for server in servers)),
            "servers": float(len(self._usable())),
            "routed": float(self._router.placed),
            "prefix_known": float(self._router.known),
            "prefix_hits": float(self._router.hits),
            "others": sum(self._router.others(server.url) for server in servers),
            **{name: float(count) for name, count in self._counts.items()},
            **self._seconds,
        }

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        async def close() -> None:
            for task in self._watch:
                task.cancel()
            await asyncio.gather(*(server.link.close() for server in self._servers.values()))

        await asyncio.to_thread(self._loop.call, close(), self._timeout_s)
        self._loop.close()

    async def _start(self) -> None:
        """waits for: the first usable server; unblocked by: its arrival, all servers being unusable, or PATIENCE_S."""
        deadline, told = time.monotonic() + PATIENCE_S, ""
        while True:
            refused = await self._look_at_all()
            if len(refused) == len(self._servers):
                raise refused[0][1]
            for server, error in refused:
                server.why = str(error)
            if any(server.facts for server in self._servers.values()):
                break
            said = "; ".join(server.why for server in self._servers.values())
            if time.monotonic() > deadline:
                raise EngineDiedError(
                    f"no server of engine.urls could be used for {PATIENCE_S:g} s: {said}. Is the address right, and "
                    f"the server up? {self.start_it}"
                )
            if said != told:
                log.warning("no server of engine.urls can be used yet: %s", said)
            told = said
            await asyncio.sleep(LOOK_S)
        for server in self._servers.values():
            if server.facts is None:
                log.warning("continuing without a server until it can be used: %s", server.why)
        there = [server.facts for server in self._servers.values() if server.facts is not None]
        self._shortest = min(there, key=lambda facts: facts.max_length)
        self._watch = [asyncio.create_task(self._keep_looking_at(server)) for server in self._servers.values()]

    async def _keep_looking_at(self, server: Server) -> None:
        """waits for: nothing; checks one server as long as the engine lives. Each server has its own task: one that
        accepts a connection and does not answer would otherwise hide the loss and the return of the others."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look_at(server)
            except ConfigError as error:
                if server.why != str(error):  # it came back as another server: the run continues with the rest
                    log.error("%s", error)
                server.why = str(error)

    async def _look_at_all(self) -> list[tuple[Server, ConfigError]]:
        """Check all servers; returns those that are up but cannot be used."""
        servers = list(self._servers.values())
        found = await asyncio.gather(*map(self._look_at, servers), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, ConfigError):
                raise error
        pairs = zip(servers, found, strict=True)
        return [(server, error) for server, error in pairs if isinstance(error, ConfigError)]

    async def _look_at(self, server: Server) -> None:
        """Check one server. Raises ConfigError: it is up, but cannot be used."""
        try:
            if server.facts is None:
                if time.monotonic() < server.not_before:
                    return
                facts = await server.link.facts(self._dtype, self._shape)
                if why := too_short(server.url, facts, self._config, self.max_length):
                    raise ConfigError(why)
                server.arrive(facts)
                log.info("%s is there", server.url)
                await self._arrived(server)
                return
            loading, version = self._loading, server.version
            label = await server.link.label(LOOK_TIMEOUT_S)
            server.silent_since = None
            idle = server.serves and not loading and not self._loading and server.version == version
            if idle and version_in(label, self._run) != version:
                await self._lose(server, foreign(server.url, label))
            await self._hear_of_others(server)
        except ConfigError as error:
            await self._lose(server, str(error))
            raise
        except (ServerGoneError, GenerationError) as error:
            now = time.monotonic()
            server.silent_since = server.silent_since or now
            server.why = str(error)
            if server.facts is not None and (now - server.silent_since > SILENT_S or "ConnectError" in server.why):
                await self._lose(server, str(error))

    async def _hear_of_others(self, server: Server) -> None:
        """Update the number of sequences that the server runs for other workers and clients, for finding the least
        loaded."""
        ours = server.queue.in_flight
        try:
            busy = await server.link.busy(LOOK_TIMEOUT_S)
        except (ServerGoneError, ConfigError, GenerationError):
            busy = 0.0  # it need not report it; other checks find out whether it is up
        seen = max(busy - max(ours, server.queue.in_flight), 0.0)
        known = self._router.others(server.url)
        self._router.tell(server.url, known + HEED * (seen - known))

    async def _lose(self, server: Server, why: str) -> None:
        if server.facts is None:
            return
        log.warning("lost a server: %s", why)
        self._counts["lost_servers"] += 1
        server.lose(why)
        self._router.forget(server.url)
        async with self._changed:
            self._changed.notify_all()

    def _usable(self) -> list[Server]:
        """Servers with this engine's weights; before the first load all that are up, with their own weights."""
        of_ours = self._policy_version != NO_VERSION
        return [server for server in self._servers.values() if (server.serves if of_ours else server.facts)]

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        self._counts["requests"] += 1
        siblings = [Sibling(request, member, next(self._numbers)) for member in range(request.n)]
        url = await self._place(request, request.n)
        tasks = [asyncio.create_task(self._sample(sibling, url)) for sibling in siblings]
        return await together(*tasks)

    async def _place(self, request: GenerateRequest, sequences: int) -> str:
        """waits for: a server with our weights; unblocked by: one that has received them, or the end of patience."""
        patience_s = min(PATIENCE_S, self._without_s)
        try:
            async with asyncio.timeout(patience_s), self._changed:
                await self._changed.wait_for(self._usable)
        except TimeoutError:
            said = "; ".join(server.why for server in self._servers.values())
            raise EngineDiedError(f"no server of engine.urls was left for {patience_s:g} s: {said}") from None
        return self._router.begin(request.prompt_ids, sequences, [server.url for server in self._usable()])

    async def _sample(self, sibling: Sibling, url: str) -> Completion:
        """waits for: a slot, then its last token; starts again each time its server is lost or weights overtake its
        first token.

        Raises:
            GenerationError: it returned with another version, or lost its server, more than `MOST_AGAIN` times.
        """
        placed: str | None = url
        early = lost = 0
        try:
            while True:
                if placed is None:
                    placed = await self._place(sibling.request, 1)
                server = self._servers[placed]
                try:
                    completion = await self._run_on(server, sibling)
                except (ServerGoneError, ConfigError) as error:  # ConfigError: it was restarted as another server
                    self._router.end(placed, 1)
                    placed, lost = None, lost + 1
                    await self._lose(server, str(error))
                    if lost > MOST_AGAIN:
                        raise GenerationError(f"a sequence lost its server {lost} times; last: {error}") from error
                except TimeoutError:  # overtaken
                    early += not sibling.overtaken
                    if early > MOST_AGAIN:
                        raise GenerationError(
                            f"{placed} reported {early} times another version for a sequence than when it was sent. "
                            "Are there several servers behind this address? Name each in engine.urls"
                        ) from None
                else:
                    whole = np.concatenate([sibling.request.prompt_ids, completion.token_ids])
                    self._router.extend(placed, whole)
                    return completion
                self._counts["restarted"] += 1
        finally:
            if placed is not None:
                self._router.end(placed, 1)

    async def _run_on(self, server: Server, sibling: Sibling) -> Completion:
        """Run a sequence on a server. Raises ServerGoneError; TimeoutError: the sibling was overtaken."""
        name = f"{sibling.request.request_id}.{sibling.member}.{next(self._numbers)}.{self._run}"
        answer = Answer()
        async with server.working(sibling):
            version = server.version
            run = self._run if version != NO_VERSION else None
            async for chunk in server.link.stream(sibling, name, label_of(self._run, version)):
                self._counts["generated_tokens"] += server.link.read(chunk, answer)
                if server.link.tells_spans:
                    server.has_tokens(sibling)
                if sibling.ends_now(answer.token_ids) and not answer.finish_reason:
                    await server.link.abort(name)
        completion = answer.completion(sibling, server.url, run)
        if not server.link.tells_spans and (completion.policy_versions != version).any():
            raise TimeoutError  # sent before a load but started after it: overtaken, like those that were taken back
        return completion

    async def _on_all(self, servers: Sequence[Server], work: Callable[[Server], Awaitable[Any]]) -> list[Any]:
        """Run `work` on all servers concurrently and return the results; servers that fail are lost. Raises
        EngineDiedError: all did."""
        results = await asyncio.gather(*map(work, servers), return_exceptions=True)
        done = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, EngineDiedError | ConfigError | TimeoutError):
                await self._lose(server, str(result) or f"{server.url} gave no answer in time")
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append(result)
        if not done:
            away = servers or self._servers.values()
            raise EngineDiedError(f"no server of engine.urls is left: {'; '.join(each.why for each in away)}")
        return done

    async def _commit(self, policy_version: int, urls: Sequence[str], path: str) -> None:
        """Pause each server once, in which the new weights become this version. A server that fails is lost, and gets
        whole weights when it is back."""
        servers = [server for url in urls if (server := self._servers[url]).facts is not None]
        started, self._loading = time.monotonic(), True
        try:
            await self._on_all(servers, lambda server: self._commit_on(server, policy_version, path))
            self._policy_version = policy_version
        finally:
            self._loading = False
            self._seconds["stall_s"] += time.monotonic() - started
        for server in servers:
            self._router.forget(server.url)
        async with self._changed:
            self._changed.notify_all()

    async def _commit_on(self, server: Server, policy_version: int, path: str) -> None:
        load = Load(
            label=label_of(self._run, policy_version),
            path=path,
            recompute=self._recompute,
            overtake=server.overtake,
        )
        await server.load(load, policy_version, 4 * self._timeout_s)
