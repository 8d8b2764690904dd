"""Who is there for the publisher's group: workers that live, those of them that said hello, what they are answered."""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist

from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.broadcast.protocol import Peer, fetch, hello_key, invite_key, other_version, post, wait_key

log = logging.getLogger(__name__)


class Door:
    """`grace_s`: what a living member gets to say hello or accept."""

    def __init__(self, rendezvous: PublisherRendezvous, store: dist.Store, grace_s: float) -> None:
        self._rendezvous, self._store, self._grace_s = rendezvous, store, grace_s
        self._seen = 0
        """Hellos so far."""
        self.refused = 0
        """Workers of a version that is not understood."""

    def live(self) -> list[Peer]:
        return [(member.worker, member.incarnation) for member in self._rendezvous.members()]

    @property
    def rang(self) -> bool:
        """Whether somebody has said hello since `waiting` was asked."""
        return self._store.add("hellos", 0) != self._seen

    def waiting(self, members: Collection[Peer], live: Collection[Peer]) -> list[Peer]:
        """Those of `live` that said hello and wait for an invitation.

        Each question is a round trip, so members are asked only when somebody has said hello since the last time.
        """
        hellos = self._store.add("hellos", 0)
        inside = set(members) if hellos == self._seen else set()
        self._seen = hellos
        waiting = [peer for peer in live if peer not in inside and self._store.check([hello_key(*peer)])]
        return [peer for peer in waiting if self._understands(peer)]

    def _understands(self, peer: Peer) -> bool:
        """Whether a worker is of a version that this one can serve; one that is not waits for ever, so it is told."""
        hello = fetch(self._store, hello_key(*peer))
        refusal = other_version("the learner", peer[0], hello.get("protocol"))
        if refusal:
            self.refused += 1
            log.error("weights: %s", refusal)
            self.answer(peer, hello, {"refused": refusal})
        return not refusal

    def answer(self, peer: Peer, hello: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """To what it said; it may say hello once more."""
        self._store.delete_key(hello_key(*peer))
        post(self._store, invite_key(*peer, hello["hello"]), message)

    def come(self, keys: Mapping[Peer, str]) -> list[Peer]:
        """Those whose key is there within the grace."""
        deadline = time.monotonic() + self._grace_s
        return [peer for peer, key in keys.items() if wait_key(self._store, key, max(deadline - time.monotonic(), 0.0))]
