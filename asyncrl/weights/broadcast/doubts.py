"""The publisher's doubts whether its members have connections to each other, and whom it leaves out therefore."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from asyncrl.weights.broadcast.door import Door
from asyncrl.weights.broadcast.protocol import Peer
from asyncrl.weights.broadcast.reach import MESHED, Round, name_of
from asyncrl.weights.broadcast.together import OtherSenders, sender_of
from asyncrl.weights.broadcast.wires import Link

log = logging.getLogger(__name__)


class Doubts:
    """See the module docstring.

    Args:
        store: of the publisher.
        publisher: its identity.
    """

    def __init__(self, store: dist.Store, link: Link, door: Door, others: OtherSenders, publisher: str) -> None:
        self._store, self._link, self._door, self._others = store, link, door, others
        self._me = name_of(sender_of(0, publisher))
        self.broke = False
        """Whether the last epoch broke."""
        self.left_out = 0
        """Number of times that a member was left out."""

    def names(self, peers: Sequence[Peer]) -> list[str]:
        """Return the names of all that have to connect to each other, if they should try that before they form a group
        in which they must."""
        doubted = self._link.backend in MESHED and (self.broke or any(map(self._door.tries, peers)))
        return [self._me, *self._others.names, *map(name_of, peers)] if doubted else []

    def settle(self, epoch: int, names: Sequence[str], seats: Mapping[Peer, int]) -> list[Peer]:
        """Let all try to connect to each other; leave out as few as possible, and return the other members.

        Args:
            seats: the members, each with its first rank.
        """
        self.broke = False
        self._others.reach(epoch, names)
        ranks = {name_of(peer): (self._door.tries(peer), seat) for peer, seat in seats.items()}
        out = Round(self._store, epoch, names).judge(self._me, self._link, ranks)
        for peer in seats:
            if why := out.get(name_of(peer)):
                self.leave_out(peer, f"{why}. With weights.backend={self._link.backend} all connect to all")
        return [peer for peer in seats if name_of(peer) not in out]

    def leave_out(self, peer: Peer, why: str) -> None:
        self.left_out += 1
        log.warning("weights: %s is left out for %.0f s: %s", peer[0], self._door.put_off(peer), why)
