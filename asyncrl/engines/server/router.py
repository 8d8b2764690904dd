"""Chooses the server for a request: the one that holds the prefix of its prompt, otherwise the least loaded one.

Pure: no sockets, no clock. A group's members and an episode's turns share a prefix, so they go to the server that has
it cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK = 32
"""Tokens per block of the lookup. vLLM caches whole blocks too (16 on most GPUs, 128 on a CPU)."""
REMEMBERED = 1 << 16
"""Limit on the remembered blocks per server: the oldest are forgotten, as the server's own cache forgets them."""
SKEW = 1.15
SLACK = 8
"""A server whose load would exceed SKEW times the mean, and the least load by more than SLACK sequences, is passed over
although it holds the prompt. Its load from other clients counts."""


@dataclass(slots=True)
class _Held:
    """State of one server."""

    load: float = 0.0
    """Sequences that we sent to it and that have not ended."""
    others: float = 0.0
    """Sequences that other clients sent to it."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Digests of prefixes that it has seen."""
    last: int = 0
    """Number of the last request that was sent to it."""

    @property
    def busy(self) -> float:
        return self.load + self.others

    @property
    def turn(self) -> tuple[float, int]:
        """The smallest is next: the least loaded, of equal ones the one that has waited longest."""
        return self.busy, self.last

    def begins(self, digests: Sequence[int]) -> int:
        """How many of the digests, from the first on, it has seen."""
        return next((count for count, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def remember(self, digests: Sequence[int]) -> None:
        for digest in reversed(digests):  # the first block becomes the newest: without it the rest is useless
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        while len(self.blocks) > REMEMBERED:
            self.blocks.popitem(last=False)


class Router:
    """Args: names: of all servers, including those that are away for now."""

    def __init__(self, names: Sequence[str]) -> None:
        self._servers = {name: _Held() for name in names}
        self.placed, self.hits = 0, 0
        """Requests so far, and those that went to a server with their prefix."""
        self.known = 0
        """Requests whose prefix some server had."""

    def load(self, name: str) -> float:
        return self._servers[name].load

    def others(self, name: str) -> float:
        """The last value given to `tell`."""
        return self._servers[name].others

    def tell(self, name: str, others: float) -> None:
        """Set the number of sequences that the server runs for other clients."""
        self._servers[name].others = others

    def begin(self, token_ids: NDArray[np.int32], sequences: int, usable: Collection[str]) -> str:
        """Choose the server for `sequences` completions of one prompt; the caller reports their end with `end`. Equal
        servers take turns.

        Raises:
            ValueError: no server is usable.
        """
        servers = {name: held for name, held in self._servers.items() if name in usable}
        if not servers:
            raise ValueError("no server is usable")
        digests = beginnings(token_ids)
        found = {name: held.begins(digests) for name, held in servers.items()}
        longest = max(found.values())
        least = min(servers, key=lambda name: servers[name].turn)
        holders = (name for name, count in found.items() if count == longest)
        holder = min(holders, key=lambda name: servers[name].turn)
        mean = (sum(held.busy for held in servers.values()) + sequences) / len(servers)
        crowded = servers[holder].busy + sequences > max(SKEW * mean, servers[least].busy + max(SLACK, sequences))
        chosen = holder if longest and not crowded else least
        self.placed += 1
        self.known += longest > 0
        self.hits += 0 < longest == found[chosen]
        servers[chosen].load += sequences
        servers[chosen].last = self.placed
        servers[chosen].remember(digests)
        return chosen

    def extend(self, name: str, token_ids: NDArray[np.int32]) -> None:
        """Record a prompt and its completion, whose KV cache the server now holds: the next turn starts with them."""
        self._servers[name].remember(beginnings(token_ids))

    def end(self, name: str, sequences: int) -> None:
        held = self._servers[name]
        if sequences > held.load:
            raise ValueError(f"{name} has {held.load} sequences, not {sequences}")
        held.load -= sequences

    def forget(self, name: str) -> None:
        """Forget the server's prefixes: it has other weights, or was restarted."""
        self._servers[name].blocks.clear()


def beginnings(token_ids: NDArray[np.int32]) -> list[int]:
    """[P] ids -> digests of the first block, the first two, and so on; for a prompt shorter than a block, of the
    prompt."""
    if len(token_ids) < BLOCK:
        return [xxhash.xxh3_64_intdigest(token_ids.astype("<i4").tobytes())]
    running = xxhash.xxh3_64()
    digests = []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        running.update(token_ids[start : start + BLOCK].astype("<i4").tobytes())
        digests.append(running.intdigest())
    return digests
