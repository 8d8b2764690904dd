"""State that an engine keeps of one server: whether it is up, and what it runs for us. On the engine's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.checks.servers import ServerFacts
from asyncrl.engines.server.answers import ServerGoneError
from asyncrl.engines.server.link import Load, ServerLink
from asyncrl.engines.vllm.admission import AdmissionQueue, AdmissionWindow
from asyncrl.engines.vllm.sibling import Sibling
from asyncrl.types import NO_VERSION


class Server:
    """`facts` is None while it is away. A server is up once it answers, and serves once it has received our weights."""

    def __init__(self, link: ServerLink, sequences: int) -> None:
        self.link = link
        self.facts: ServerFacts | None = None
        self.serves = False
        self.version = NO_VERSION
        self.arrivals = 0
        """Number of arrivals; a restarted server counts as another."""
        self.why = "it was not contacted yet"
        self.silent_since: float | None = None
        self.not_before = 0.0
        """`time.monotonic()` before which it is not checked."""
        self.queue = AdmissionQueue(AdmissionWindow(sequences))
        self._work: set[asyncio.Timeout] = set()
        self._tokenless: dict[Sibling, asyncio.Timeout] = {}

    @property
    def url(self) -> str:
        return self.link.url

    def arrive(self, facts: ServerFacts) -> None:
        self.facts, self.silent_since, self.version = facts, None, NO_VERSION
        self.arrivals += 1

    def lose(self, why: str) -> None:
        """Mark the server as lost; sequences that wait for it go elsewhere."""
        self.facts, self.serves, self.why = None, False, why
        for scope in self._work:
            _expire(scope)

    async def load(self, load: Load, version: int, within_s: float) -> None:
        """Load weights; no new sequence starts meanwhile. Raises TimeoutError, or as its link does."""
        self.queue.close()
        try:
            async with asyncio.timeout(within_s):
                await self.link.load(load)
                self.serves, self.version = True, version
        finally:
            self.queue.open()

    def overtake(self) -> None:
        """Take back sequences without a token: after a load they might start on KV cache of the old version."""
        for sibling, scope in self._tokenless.items():
            sibling.overtaken = True
            _expire(scope)

    def has_tokens(self, sibling: Sibling) -> None:
        self._tokenless.pop(sibling, None)

    @asynccontextmanager
    async def working(self, sibling: Sibling) -> AsyncIterator[None]:
        """Hold a slot in the server's queue; inside, `sibling` is with the server.

        Raises:
            ServerGoneError: the server was lost meanwhile.
            TimeoutError: the sibling was overtaken.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._work.add(scope)
                try:
                    if self.facts is None:
                        raise ServerGoneError(self.why)
                    await self.queue.enter(sibling.ticket)
                    try:
                        sibling.begin()
                        self._tokenless[sibling] = scope
                        yield
                    finally:
                        self._tokenless.pop(sibling, None)
                        self.queue.leave()
                finally:
                    self._work.discard(scope)
        except TimeoutError:
            if sibling.overtaken and self.facts is not None:
                raise
            raise ServerGoneError(self.why) from None


def _expire(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
