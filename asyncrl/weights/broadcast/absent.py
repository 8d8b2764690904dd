"""Finds workers that the replay server knows but that never came to the publisher: they cannot reach `weights.host`."""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import torch.distributed as dist

from asyncrl.weights.broadcast.protocol import Peer, introduced

log = logging.getLogger(__name__)

TOLD_S = 15.0
"""Seconds after which a worker counts as absent. A worker comes here as soon as the replay server knows it; one try to
connect takes 5 s at most."""


class Absent:
    """Reports absent workers. `where`: the address of the `store` that they should connect to."""

    def __init__(self, store: dist.Store, where: str) -> None:
        self._store, self._where = store, where
        self._since: dict[Peer, float] = {}
        self._known: set[Peer] = set()
        """Peers that came once, or were reported."""

    def look(self, live: Collection[Peer]) -> None:
        """Report each peer once that has not come for `TOLD_S`."""
        now = time.monotonic()
        self._known &= set(live)
        self._known |= {peer for peer in live if peer not in self._known and introduced(self._store, peer)}
        self._since = {peer: self._since.get(peer, now) for peer in live if peer not in self._known}
        late = sorted(peer for peer, since in self._since.items() if now - since >= TOLD_S)
        self._known |= set(late)
        for worker, _ in late:
            log.warning(
                "weights: %s is known to the replay server, but has not come here for weights, to %s, for %.0f s. "
                "weights.host must be an address of the learner that its machine can reach, with an open port "
                "(weights.port sets it). The log of the worker says what went wrong",
                worker, self._where, TOLD_S,
            )  # fmt: skip
