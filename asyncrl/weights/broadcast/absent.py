"""Workers that the replay server knows, and that never came to the publisher: they do not reach `weights.host`."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from asyncrl.weights.broadcast.protocol import Peer

log = logging.getLogger(__name__)

TOLD_S = 15.0
"""A worker says hello here in the moment in which it is known there; a try to connect takes 5 s at most."""


class Absent:
    """`where`: the store that they should come to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._since: dict[Peer, float] = {}
        self._known: set[Peer] = set()
        """That came once, or were told of."""

    def look(self, live: Collection[Peer], here: Collection[Peer]) -> None:
        """Say once of each which has not come for `TOLD_S`."""
        now = time.monotonic()
        self._known = (self._known | set(here)) & set(live)
        self._since = {peer: self._since.get(peer, now) for peer in live if peer not in self._known}
        late = sorted(peer for peer, since in self._since.items() if now - since >= TOLD_S)
        self._known |= set(late)
        for worker, _ in late:
            log.warning(
                "weights: %s is known to the replay server, and has not come here for weights, to %s, for %.0f s. "
                "weights.host has to be an address of the learner that its machine reaches, and the port open "
                "(weights.port sets it); what it met is in its log",
                worker, self._where, TOLD_S,
            )  # fmt: skip
