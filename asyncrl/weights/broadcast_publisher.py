"""Broadcast transport, learner end: forms the group, sends, verifies acknowledgements, re-forms without the silent.

One bad receiver aborts a broadcast for all. So whatever goes wrong has one cure: dissolve the group, let every member
that lives say hello again, form the next epoch with those, re-send. A member that was dropped says hello when it can,
and is brought up to date by the next epoch.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

import torch

from asyncrl.errors import WeightsError
from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.group import WeightGroup, host_store
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.protocol import POLL_S, fetch, hello_key, invite_key, post, wait_key
from asyncrl.weights.snapshot import Snapshot

log = logging.getLogger(__name__)

Peer = tuple[str, str]
"""(worker, incarnation)."""
_MAX_ATTEMPTS = 8
_GRACE_S = 2.0
"""What a living member gets to say hello or accept; one that missed it comes back by itself."""


class BroadcastSender:
    """Implements `snapshot.Sender`.

    Args:
        host: address the store binds, and at which the workers reach it.
        backend: `gloo` or `nccl`; subscribers learn it from the board.
    """

    def __init__(
        self,
        rendezvous: PublisherRendezvous,
        *,
        host: str,
        timeout_s: float,
        backend: str = "gloo",
        device: torch.device | None = None,
        poll_members_s: float = 1.0,
    ) -> None:
        self._rendezvous = rendezvous
        self._host, self._timeout_s = host, timeout_s
        self._backend, self._device = backend, device
        self._poll_members_s = poll_members_s
        self._store, self._port = host_store(host, timeout_s)
        self._publisher = secrets.token_hex(8)
        self._epoch = 0
        self._event = 0
        self._group: WeightGroup | None = None
        self._members: list[Peer] = []
        self._hellos_seen = 0
        self._next_look = 0.0
        self._stats = dict.fromkeys(("wire_s", "engines", "resends", "dropped", "refused", "epoch", "bytes"), 0.0)
        self._announce()

    def send(self, snapshot: Snapshot) -> None:
        live = self._live()
        if not set(self._members) <= set(live) or self._waiting(live):
            self._dissolve()
        for attempt in range(_MAX_ATTEMPTS):
            if self._group is None and not self._form(snapshot.manifest):
                self._stats["engines"] = 0.0
                return
            broken = ""
            try:
                if self._broadcast(snapshot):
                    return
            except RuntimeError as error:
                broken = str(error).splitlines()[0]
            if broken:
                # Not in the handler: the exception's frames hold the group, whose sockets would stay open and keep
                # the other members waiting for their whole timeout.
                log.warning("weights: epoch %d broke at version %d: %s", self._epoch, snapshot.policy_version, broken)
                self._dissolve()
            self._stats["resends"] += 1
            log.info("weights: version %d is sent again (attempt %d)", snapshot.policy_version, attempt + 2)
        log.error("weights: version %d was given up after %d attempts", snapshot.policy_version, _MAX_ATTEMPTS)
        self._dissolve()

    def idle(self, newest: Snapshot | None) -> None:
        hellos = self._store.add("hellos", 0)
        due = time.monotonic() >= self._next_look
        if newest is None or (hellos == self._hellos_seen and not due):
            return
        self._next_look = time.monotonic() + self._poll_members_s
        self._hellos_seen = hellos
        if self._newcomers():
            self.send(newest)

    def stats(self) -> dict[str, float]:
        return {f"weights/{key}": value for key, value in self._stats.items()}

    def close(self) -> None:
        if self._group is not None:
            self._post_event({"kind": "bye"})
            # Waits for members to hang up, briefly: a store that vanishes under them fills their logs with traces.
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and self._store.add(f"{self._epoch}/gone", 0) < len(self._members):
                time.sleep(POLL_S)
            self._group.abort()
            self._group = None

    def _announce(self) -> None:
        board = {"transport": "broadcast", "host": self._host, "port": self._port, "publisher": self._publisher}
        board |= {"backend": self._backend, "epoch": self._epoch, "members": [list(peer) for peer in self._members]}
        self._rendezvous.announce({"weights": board})

    def _live(self) -> list[Peer]:
        return [(member.worker, member.incarnation) for member in self._rendezvous.members()]

    def _newcomers(self) -> list[Peer]:
        """Live workers that said hello and wait for an invitation."""
        return self._waiting(self._live())

    def _waiting(self, live: list[Peer]) -> list[Peer]:
        return [peer for peer in live if self._store.check([hello_key(*peer)])]

    def _dissolve(self) -> None:
        """End the epoch, and give its members a moment to say hello for the next."""
        if self._group is None:
            return
        self._post_event({"kind": "next"})
        self._group.abort()
        self._group = None
        expected, self._members = set(self._members) & set(self._live()), []
        deadline = time.monotonic() + min(_GRACE_S, self._timeout_s)
        # Waits for the members of the old epoch; who stays silent is left out.
        while expected and time.monotonic() < deadline:
            expected -= {peer for peer in expected if self._store.check([hello_key(*peer)])}
            time.sleep(POLL_S)
        self._drop(expected)

    def _form(self, manifest: Manifest) -> bool:
        """Next epoch with everyone who said hello; false when that is nobody."""
        peers = self._newcomers()
        while peers:
            self._epoch += 1
            self._event = 0
            accepted = self._invite(peers, manifest)
            together = accepted == peers
            post(self._store, f"{self._epoch}/go", together)
            if not together:
                self._drop(set(peers) - set(accepted))
                peers = self._rejoined(accepted)
                continue
            try:
                self._group = WeightGroup(
                    self._store, backend=self._backend, host=self._host, epoch=self._epoch, rank=0,
                    world=len(peers) + 1, timeout_s=self._timeout_s, device=self._device,
                )  # fmt: skip
            except RuntimeError as error:
                log.warning("weights: epoch %d could not be formed: %s", self._epoch, error)
                peers = self._rejoined(peers)
                continue
            self._members = peers
            self._stats["epoch"] = float(self._epoch)
            self._announce()
            return True
        return False

    def _invite(self, peers: Sequence[Peer], manifest: Manifest) -> list[Peer]:
        """Invite all; those who accepted within the grace."""
        wire = manifest.to_wire()
        for rank, peer in enumerate(peers, 1):
            hello = fetch(self._store, hello_key(*peer))
            self._store.delete_key(hello_key(*peer))
            message = {"epoch": self._epoch, "rank": rank, "world": len(peers) + 1, "manifest": wire}
            post(self._store, invite_key(*peer, hello), message)
        deadline = time.monotonic() + min(_GRACE_S, self._timeout_s)
        keys = {peer: f"{self._epoch}/accept/{rank}" for rank, peer in enumerate(peers, 1)}
        return [peer for peer in peers if wait_key(self._store, keys[peer], max(deadline - time.monotonic(), 0.0))]

    def _rejoined(self, peers: Sequence[Peer]) -> list[Peer]:
        """Those of `peers` that say hello again after a failed formation."""
        deadline = time.monotonic() + min(_GRACE_S, self._timeout_s)
        return [
            peer for peer in peers if wait_key(self._store, hello_key(*peer), max(deadline - time.monotonic(), 0.0))
        ]

    def _drop(self, peers: set[Peer]) -> None:
        self._stats["dropped"] += len(peers)
        for worker, incarnation in sorted(peers):
            log.warning("weights: %s (%s) is silent; going on without it", worker, incarnation)

    def _post_event(self, message: dict[str, object]) -> None:
        self._event += 1
        post(self._store, f"{self._epoch}/event/{self._event}", message)
        if self._event > 2:
            self._store.delete_key(f"{self._epoch}/event/{self._event - 2}")
            self._store.delete_key(f"{self._epoch}/prints/{self._event - 2}")

    def _broadcast(self, snapshot: Snapshot) -> bool:
        """Send all buckets and collect the acknowledgements; false when somebody's bytes differed."""
        group = self._group
        assert group is not None
        started = time.perf_counter()
        self._post_event({"kind": "send", "policy_version": snapshot.policy_version})
        prints = []
        for index, buffer in enumerate(snapshot.buffers):
            work = group.broadcast(buffer)
            prints.append(snapshot.fingerprint(index))  # hashed while it is on the wire
            group.wait(work)
        post(self._store, f"{self._epoch}/prints/{self._event}", prints)
        self._stats["wire_s"] = time.perf_counter() - started
        answers = [self._answer(rank) for rank in range(1, group.world)]
        for (worker, _), (verdict, detail) in zip(self._members, answers, strict=True):
            if verdict == "bad":
                log.warning("weights: %s received version %d damaged: %s", worker, snapshot.policy_version, detail)
        served = sum(verdict == "ok" for verdict, _ in answers)
        refused = [i for i, (verdict, _) in enumerate(answers) if verdict == "fail"]
        if refused:
            # Its own thread has stopped and its worker will fail with the reason; the others must not wait for it.
            self._stats["refused"] += len(refused)
            who = f"{self._members[refused[0]][0]}: {answers[refused[0]][1]}"
            self._members = [peer for i, peer in enumerate(self._members) if i not in refused]
            raise WeightsError(f"refused by the engine of {who}")
        self._stats |= {"engines": float(served), "bytes": float(snapshot.manifest.nbytes)}
        return served == len(answers)

    def _answer(self, rank: int) -> tuple[str, str]:
        """What `rank` says about the last event. Waits for it as long as it shows life every `timeout_s`."""
        key, beat = f"{self._epoch}/ack/{self._event}/{rank}", f"{self._epoch}/beat/{self._event}/{rank}"
        last = self._store.add(beat, 0)
        deadline = time.monotonic() + self._timeout_s
        while not wait_key(self._store, key, min(0.5, self._timeout_s)):
            count = self._store.add(beat, 0)
            if count != last:
                last, deadline = count, time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                worker = self._members[rank - 1][0]
                raise WeightsError(f"waited {self._timeout_s} s for {worker} to acknowledge")
        verdict, detail = fetch(self._store, key)
        for used in (key, beat):
            self._store.delete_key(used)
        return verdict, detail
