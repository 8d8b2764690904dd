"""Candidates for the publisher's group: which workers are live, which of them said hello or never came, and the answers
to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist

from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.broadcast.protocol import (
    Peer,
    fetch,
    hello_key,
    introduced,
    invite_key,
    other_version,
    post,
    wait_key,
)
from asyncrl.weights.sliced import Wanted, wanted_from_wire

log = logging.getLogger(__name__)


TOLD_S = 15.0
"""Seconds after which a worker counts as absent. A worker comes here as soon as the replay server knows it; one try to
connect takes 5 s at most."""
_LONGEST_AWAY_S = 900.0
"""Limit on the seconds for which a worker without a connection is not invited: each try holds up all others."""
NAMED = 8
"""Limit on the workers that a report names: an address that nobody reaches would fill the log with a line for each."""


class Door:
    """Receives hellos and answers them.

    Args:
        where: the address of the `store` that workers should connect to.
        grace_s: seconds that a live member has to say hello or accept.
    """

    def __init__(self, rendezvous: PublisherRendezvous, store: dist.Store, where: str, grace_s: float) -> None:
        self._rendezvous, self._store, self._where, self._grace_s = rendezvous, store, where, grace_s
        self._since: dict[Peer, float] = {}
        self._known: set[Peer] = set()
        """Peers that came once, or were reported as absent."""
        self._seen = 0
        """Number of hellos at the last call to `waiting`."""
        self._apart: dict[Peer, tuple[int, float]] = {}
        """Peers without a connection: tries in a row, and the time from which on they are invited again."""
        self.refused = 0
        """Number of workers refused because of another protocol version."""

    def live(self) -> list[Peer]:
        return [(member.worker, member.incarnation) for member in self._rendezvous.members()]

    def report_absent(self, live: Collection[Peer]) -> None:
        """Report each peer once that the replay server knows but that has not come here for `TOLD_S`: it cannot reach
        `weights.host`."""
        now = time.monotonic()
        self._known &= set(live)
        self._known |= {peer for peer in live if peer not in self._known and introduced(self._store, peer)}
        self._since = {peer: self._since.get(peer, now) for peer in live if peer not in self._known}
        late = sorted(peer for peer, since in self._since.items() if now - since >= TOLD_S)
        self._known |= set(late)
        if late:
            names = ", ".join(worker for worker, _ in late[:NAMED])
            log.warning(
                "weights: workers that the replay server knows have not come here for weights, to %s, for %.0f s: "
                "%s%s. weights.host must be an address of the learner that a worker's machine can reach, with an open "
                "port (weights.port sets it). The log of a worker says what went wrong",
                self._where, TOLD_S, names, f" and {len(late) - NAMED} more" if len(late) > NAMED else "",
            )  # fmt: skip

    @property
    def rang(self) -> bool:
        """Whether a worker has said hello since the last call to `waiting`."""
        return self._store.add("hellos", 0) != self._seen

    def waiting(self, members: Collection[Peer], live: Collection[Peer]) -> list[Peer]:
        """Return the peers of `live` that said hello and wait for an invitation.

        Each check is a round trip to the store, so `members` are checked only if a worker has said hello since the last
        call.
        """
        hellos = self._store.add("hellos", 0)
        inside = set(members) if hellos == self._seen else set()
        inside |= {peer for peer, (_, until) in self._apart.items() if time.monotonic() < until}
        self._seen = hellos
        waiting = [peer for peer in live if peer not in inside and self._store.check([hello_key(*peer)])]
        return [peer for peer in waiting if self._understands(peer)]

    def put_off(self, peer: Peer) -> float:
        """Return for how many seconds a peer is not invited that has no connection."""
        tries = self._apart.get(peer, (0, 0.0))[0] + 1
        away_s = min(2.0 ** min(tries, 16), _LONGEST_AWAY_S)
        self._apart[peer] = tries, time.monotonic() + away_s
        return away_s

    def formed(self, members: Collection[Peer]) -> None:
        """These are connected; those that are gone do not come back."""
        live = set(self.live())
        self._apart = {peer: said for peer, said in self._apart.items() if peer in live and peer not in members}

    def _understands(self, peer: Peer) -> bool:
        """Whether a worker has a protocol version that this publisher can serve. If not, send it a refusal, as it would
        wait forever."""
        hello = fetch(self._store, hello_key(*peer))
        refusal = other_version("the learner", peer[0], hello.get("protocol"))
        if refusal:
            self.refused += 1
            log.error("weights: %s", refusal)
            self.answer(peer, hello, {"refused": refusal})
        return not refusal

    def answer(self, peer: Peer, hello: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """Answer a hello and delete it, so that the peer may say hello again."""
        self._store.delete_key(hello_key(*peer))
        post(self._store, invite_key(*peer, hello["hello"]), message)

    def come(self, keys: Mapping[Peer, str]) -> list[Peer]:
        """Return the peers whose key appears in the store within `grace_s` seconds."""
        deadline = time.monotonic() + self._grace_s
        return [peer for peer, key in keys.items() if wait_key(self._store, key, max(deadline - time.monotonic(), 0.0))]


def wanted_of(hello: Mapping[str, Any]) -> list[Wanted]:
    """Return what each process of a worker wants; {} for all tensors, whole."""
    said: list[Wanted] = [wanted_from_wire(each) for each in hello["wanted"]]
    return said if len(said) == int(hello["width"]) else [{}] * int(hello["width"])
