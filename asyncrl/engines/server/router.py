"""Which of several servers makes a request: the one that holds the beginning of its prompt, else the least loaded.

Pure: no sockets, no clock. A group's members and an episode's turns begin alike, so they end up where their keys are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

BLOCK = 32
"""Tokens that are looked up together. vLLM caches whole blocks too (16 on most GPUs, 128 on a CPU)."""
REMEMBERED = 1 << 16
"""Blocks per server: the oldest are forgotten, as the server's own cache forgets them."""
SKEW = 1.15
SLACK = 8
"""A server whose load would be above SKEW times the mean, and by SLACK sequences above the least, is passed over though
it holds the prompt. What it makes for others counts."""


@dataclass(slots=True)
class _Held:
    """What is known of one server."""

    load: float = 0.0
    """Sequences that it was given and that have not ended."""
    others: float = 0.0
    """Those that somebody else gave it."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Digests of beginnings that it has seen."""

    @property
    def busy(self) -> float:
        return self.load + self.others

    def begins(self, digests: Sequence[int]) -> int:
        """How many of them, from the first on, it has seen."""
        return next((count for count, digest in enumerate(digests) if digest not in self.blocks), len(digests))

    def remember(self, digests: Sequence[int]) -> None:
        for digest in reversed(digests):  # the beginning is the youngest: without it the rest is of no use
            self.blocks[digest] = None
            self.blocks.move_to_end(digest)
        while len(self.blocks) > REMEMBERED:
            self.blocks.popitem(last=False)


class Router:
    """Args: names: of all servers, of which some may be away for now."""

    def __init__(self, names: Sequence[str]) -> None:
        self._servers = {name: _Held() for name in names}
        self.placed, self.hits = 0, 0
        """Requests so far, and those that went where their beginning was."""
        self.known = 0
        """Requests whose beginning some server had."""

    def load(self, name: str) -> float:
        return self._servers[name].load

    def others(self, name: str) -> float:
        """As it was told last."""
        return self._servers[name].others

    def tell(self, name: str, others: float) -> None:
        """How many sequences it makes for others than us."""
        self._servers[name].others = others

    def begin(self, token_ids: NDArray[np.int32], sequences: int, usable: Collection[str]) -> str:
        """The server for `sequences` completions of one prompt; the caller says when they have ended. Of servers that
        are alike the first in the order of `names` is taken.

        Raises:
            ValueError: none is usable.
        """
        servers = {name: held for name, held in self._servers.items() if name in usable}
        if not servers:
            raise ValueError("no server is usable")
        digests = beginnings(token_ids)
        found = {name: held.begins(digests) for name, held in servers.items()}
        longest = max(found.values())
        least = min(servers, key=lambda name: servers[name].busy)
        holders = (name for name, count in found.items() if count == longest)
        holder = min(holders, key=lambda name: servers[name].busy)
        mean = (sum(held.busy for held in servers.values()) + sequences) / len(servers)
        crowded = servers[holder].busy + sequences > max(SKEW * mean, servers[least].busy + max(SLACK, sequences))
        chosen = holder if longest and not crowded else least
        self.placed += 1
        self.known += longest > 0
        self.hits += 0 < longest == found[chosen]
        servers[chosen].load += sequences
        servers[chosen].remember(digests)
        return chosen

    def extend(self, name: str, token_ids: NDArray[np.int32]) -> None:
        """A prompt and its completion, which the server now holds keys of: the next turn begins with them."""
        self._servers[name].remember(beginnings(token_ids))

    def end(self, name: str, sequences: int) -> None:
        held = self._servers[name]
        if sequences > held.load:
            raise ValueError(f"{name} has {held.load} sequences, not {sequences}")
        held.load -= sequences

    def forget(self, name: str) -> None:
        """Its keys are gone: it has other weights, or was started anew."""
        self._servers[name].blocks.clear()


def beginnings(token_ids: NDArray[np.int32]) -> list[int]:
    """[P] ids -> digests of the first block, the first two, and so on; of a prompt shorter than a block, its own."""
    if len(token_ids) < BLOCK:
        return [xxhash.xxh3_64_intdigest(token_ids.astype("<i4").tobytes())]
    running = xxhash.xxh3_64()
    digests = []
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        running.update(token_ids[start : start + BLOCK].astype("<i4").tobytes())
        digests.append(running.intdigest())
    return digests
