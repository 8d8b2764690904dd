"""Broadcast transport, learner end: forms the group, sends weights, checks the acknowledgements, and re-forms the group
without members that are silent.

One bad receiver aborts a broadcast for all. So every failure is handled in the same way: dissolve the group, let all
live members say hello again, form the next epoch with them, and send again. A member that was dropped says hello when
it can, and the next epoch brings it up to date.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.types import NO_VERSION
from asyncrl.weights.base import PublisherRendezvous
from asyncrl.weights.broadcast.door import Door, wanted_of
from asyncrl.weights.broadcast.forming import ApartError
from asyncrl.weights.broadcast.group import WeightGroup, publisher_store
from asyncrl.weights.broadcast.protocol import (
    POLL_S,
    PROTOCOL,
    TICK_S,
    Peer,
    collect,
    fetch,
    forgotten_key,
    hello_key,
    post,
)
from asyncrl.weights.broadcast.sending import IN_USE, SendGroups, send
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.ipc import machine
from asyncrl.weights.plan import SendPlan
from asyncrl.weights.publishing.buffers import StagingBuffers
from asyncrl.weights.publishing.version import Buckets, Version

log = logging.getLogger(__name__)

REPORTED = ("load_s", "stall_s", "canary_max", "canary_mean")
"""Measurements that engines report for a version they serve. The largest over the engines becomes a metric, which is
kept until a later version reports it again."""
_STATS = (
    "wire_s", "wire_bytes", "update_s", "engines", "resends", "dropped", "refused",
    "canary_failed", "epoch", "bytes",
)  # fmt: skip
_MAX_ATTEMPTS = 8
_KEPT_EVENTS = 256
"""Number of events of an epoch that stay in the store. A member that falls further behind, because it stood still or
its engine was loading, says hello again."""
LANE_BUCKET = 16 << 20
"""Limit on a bucket that is for some of the receivers only: three are held at a time."""
_GRACE_S = 2.0
"""Seconds that a live member has to say hello or accept. A member that misses this returns by itself."""


class BroadcastSender:
    """Implements `publishing.publisher.Sender`.

    Args:
        port: port of the store; 0 for any free one.
        poll_members_s: longest time without asking the server who the members are; one that says hello is seen at
            once, and one that dies between two looks breaks the transfer, which is repeated without it.
    """

    def __init__(
        self,
        rendezvous: PublisherRendezvous,
        link: Link,
        *,
        port: int = 0,
        poll_members_s: float = 1.0,
    ) -> None:
        self._rendezvous, self._link = rendezvous, link
        self._poll_members_s = poll_members_s
        self._store, self._port = publisher_store(link.host, link.timeout_s, port)
        self._door = Door(rendezvous, self._store, f"{link.host}:{self._port}", min(_GRACE_S, link.timeout_s))
        self._publisher = secrets.token_hex(8)
        self._epoch = 0
        self._event = 0
        self._groups: SendGroups | None = None
        self._buffers = StagingBuffers(link.place, count=IN_USE, shared=link.backend == "ipc")
        self._behind = False
        self._members: list[Peer] = []
        self._seats: dict[Peer, int] = {}
        """Member -> its first rank. An engine with several processes takes as many ranks."""
        self._next_look = self._next_tick = 0.0
        self._asked = 0.0
        """Time at which the server was last asked for the members."""
        self._stats: dict[str, float] = dict.fromkeys(_STATS, 0.0) | {"sent_version": float(NO_VERSION)}
        self._announce()

    @property
    def behind(self) -> bool:
        return self._behind

    def send(self, version: Version) -> None:
        self._behind = False
        if self._groups is not None and (time.monotonic() >= self._asked + self._poll_members_s or self._door.rang):
            live = self._live()
            if not set(self._members) <= set(live) or self._door.waiting(self._members, live):
                self._dissolve()
        for attempt in range(_MAX_ATTEMPTS):
            if self._groups is None and not self._form(version):
                self._stats["engines"] = 0.0
                return
            broken, gone, said = "", False, self._event
            try:
                if self._broadcast(version):
                    return
            except RuntimeError as error:
                broken, gone = str(error).splitlines()[0], isinstance(error, WeightsGoneError)
            self._behind = gone
            if gone and self._event == said:
                return  # nothing of this version was sent and the group is intact: it gets the next version
            if broken:
                # Not in the `except` block: there the exception's frames hold the group, whose sockets would stay open
                # and keep the other members waiting for their whole timeout.
                log.warning("weights: epoch %d broke at version %d: %s", self._epoch, version.policy_version, broken)
                self._dissolve()
            if gone:
                return
            if version.failure:
                raise WeightsError(version.failure)
            self._stats["resends"] += 1
            log.info("weights: version %d is sent again (attempt %d)", version.policy_version, attempt + 2)
        log.error("weights: version %d was given up after %d attempts", version.policy_version, _MAX_ATTEMPTS)
        self._stats["engines"] = 0.0
        self._dissolve()

    def idle(self, newest: Version | None) -> None:
        self._tick()
        due = time.monotonic() >= self._next_look
        if newest is None or not (due or self._door.rang):
            return
        self._next_look = time.monotonic() + self._poll_members_s
        waiting = self._door.waiting(self._members, live := self._live())
        self._door.report_absent(live)
        if waiting and newest.gone:
            self._behind = True  # it is opened again if the learner waits for a batch; else they get the next one
        elif waiting:
            self._dissolve()
            self.send(newest)

    def _live(self) -> list[Peer]:
        self._asked = time.monotonic()
        return self._door.live()

    def stats(self) -> dict[str, float]:
        said = self._stats | {"refused": self._stats["refused"] + self._door.refused}
        return {f"weights/{key}": value for key, value in said.items()}

    def close(self) -> None:
        if self._groups is not None:
            self._post_event({"kind": "bye"})
            # Wait briefly for members to disconnect: a store that vanishes before fills their logs with tracebacks.
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and self._store.add(f"{self._epoch}/gone", 0) < len(self._members):
                time.sleep(POLL_S)
            self._groups.abort()
            self._groups = None

    def _announce(self) -> None:
        board = {"transport": "broadcast", "host": self._link.host, "port": self._port, "publisher": self._publisher}
        board |= {
            "protocol": PROTOCOL,
            "backend": self._link.backend,
            "epoch": self._epoch,
            "members": [list(peer) for peer in self._members],
            "machine": machine() if self._link.backend == "ipc" else "",
        }
        self._rendezvous.announce({"weights": board})

    def _dissolve(self) -> None:
        """End the epoch, and give its members up to `_GRACE_S` seconds to say hello for the next."""
        if self._groups is None:
            return
        self._post_event({"kind": "next"})
        self._groups.abort()
        self._groups = None
        expected, self._members = set(self._members) & set(self._door.live()), []
        deadline = time.monotonic() + min(_GRACE_S, self._link.timeout_s)
        # Wait for the members of the old epoch; those that stay silent are left out.
        while expected and time.monotonic() < deadline:
            expected -= {peer for peer in expected if self._store.check([hello_key(*peer)])}
            time.sleep(POLL_S)
        self._drop(expected)

    def _form(self, version: Version) -> bool:
        """Form the next epoch with all peers that said hello; return false if there are none. Retries with growing
        delays if the group cannot be formed."""
        peers, tries = self._door.waiting(self._members, self._door.live()), 0
        while peers:
            self._epoch += 1
            self._event = 0
            hellos = {peer: fetch(self._store, hello_key(*peer)) for peer in peers}
            wanted = [want for hello in hellos.values() for want in wanted_of(hello)]
            plan = SendPlan.of(version.manifest, wanted, LANE_BUCKET)
            shape = {"world": 1 + len(wanted), "manifest": version.manifest.to_wire(), "plan": plan.to_wire()}
            accepted = self._invite(hellos, shape)
            together = accepted == peers
            post(self._store, f"{self._epoch}/go", together)
            if not together:
                self._drop(set(peers) - set(accepted))
            else:
                accepted = self._seated(peers, plan)
                if self._groups is not None:
                    return True
                time.sleep(min(1.0, POLL_S * 2 ** min(tries, 10)))
                tries += 1
            peers = self._door.come({peer: hello_key(*peer) for peer in accepted})
        return False

    def _seated(self, peers: list[Peer], plan: SendPlan) -> list[Peer]:
        """Form this epoch's groups with all `peers`, or leave `_groups` as None; returns whom to invite next then."""
        try:
            self._groups = SendGroups.form(self._group, plan)
        except RuntimeError as error:
            if isinstance(error, ApartError):
                last = max((peer for peer in peers if self._seats[peer] <= error.seat), key=self._seats.__getitem__)
                self._stats["dropped"] += 1
                log.warning("weights: %s is left out for %.0f s: it has %s", last[0], self._door.put_off(last), error)
                peers = [peer for peer in peers if peer != last]
            else:
                log.warning("weights: epoch %d could not be formed: %s", self._epoch, error)
            # A member for which it did form would otherwise wait in this epoch for events that never come.
            self._post_event({"kind": "next"})
            return peers
        self._members = peers
        self._door.formed(peers)
        self._stats["epoch"] = float(self._epoch)
        self._announce()
        return peers

    def _group(self, name: str, world: int) -> WeightGroup:
        return WeightGroup(
            self._store, self._link, epoch=self._epoch, rank=0, world=world, name=name, watch=self._watch
        )

    def _watch(self) -> str:
        """Say who has died while the epoch forms, if anyone: in its place nobody would come."""
        gone = sorted(worker for worker, _ in set(self._seats) - set(self._door.live()))
        return f"{gone[0]} died before it had joined" if gone else ""

    def _invite(self, hellos: Mapping[Peer, Mapping[str, Any]], shape: Mapping[str, Any]) -> list[Peer]:
        """Invite all peers that said hello; return those that accepted in time.

        Args:
            shape: what all of them are told alike.
        """
        rank, self._seats = 1, {}
        for peer, hello in hellos.items():
            self._seats[peer], rank = rank, rank + int(hello["width"])
            self._door.answer(peer, hello, {"epoch": self._epoch, "rank": self._seats[peer], **shape})
        return self._door.come({peer: f"{self._epoch}/accept/{self._seats[peer]}" for peer in hellos})

    def _drop(self, peers: set[Peer]) -> None:
        self._stats["dropped"] += len(peers)
        for worker, incarnation in sorted(peers):
            log.warning("weights: %s (%s) is silent; continuing without it", worker, incarnation)

    def _post_event(self, message: dict[str, object]) -> None:
        self._event += 1
        post(self._store, f"{self._epoch}/event/{self._event}", message)
        self._next_tick = time.monotonic() + TICK_S
        if self._event > _KEPT_EVENTS:
            self._store.add(forgotten_key(self._epoch), 1)
            self._store.delete_key(f"{self._epoch}/event/{self._event - _KEPT_EVENTS}")
            self._store.delete_key(f"{self._epoch}/prints/{self._event - _KEPT_EVENTS}")

    def _tick(self) -> None:
        """Post an event if there was none for `TICK_S` seconds. Members block in the store until the next event; this
        one wakes them, so that they check whether to go on."""
        if self._groups is not None and time.monotonic() >= self._next_tick:
            self._post_event({"kind": "tick"})

    def _broadcast(self, version: Version) -> bool:
        """Send all buckets and collect the acknowledgements; return false if a member received other bytes.

        Raises:
            WeightsError: an engine refused the version.
        """
        started = time.perf_counter()
        with version.open() as buckets:
            found = self._transmit(version, buckets)
        answers = collect(
            self._store, self._members, epoch=self._epoch, event=self._event,
            timeout_s=self._link.timeout_s, live=self._door.live, meanwhile=self._tick,
        )  # fmt: skip
        for (worker, _), (verdict, detail) in zip(self._members, answers, strict=True):
            if verdict == "bad":
                log.warning("weights: %s received version %d damaged: %s", worker, version.policy_version, detail)
        served = sum(verdict == "ok" for verdict, _ in answers)
        refused = [i for i, (verdict, _) in enumerate(answers) if verdict in ("fail", "unproven")]
        if refused:
            # The subscriber's thread has stopped, and its worker will fail with the reason; the others must not wait.
            self._stats["refused"] += len(refused)
            self._stats["canary_failed"] += sum(verdict == "unproven" for verdict, _ in answers)
            who = f"{self._members[refused[0]][0]}: {answers[refused[0]][1]}"
            self._members = [peer for i, peer in enumerate(self._members) if i not in refused]
            raise WeightsError(f"refused by the engine of {who}")
        reports = [detail for verdict, detail in answers if verdict == "ok"]
        for name in REPORTED:
            values = [float(report[name]) for report in reports if name in report]
            found |= {name: max(values)} if values else {}
        found |= {"engines": float(served), "bytes": float(version.manifest.nbytes)}
        found |= {"update_s": time.perf_counter() - started, "sent_version": float(version.policy_version)}
        complete = served == len(answers)
        if complete:
            self._stats = self._stats | found  # replaced, not updated: the learner may be reading the old one
        return complete

    def _transmit(self, version: Version, buckets: Buckets) -> dict[str, float]:
        """Send every bucket, then the fingerprints.

        Returns:
            `wire_s` and `wire_bytes`.
        """
        groups = self._groups
        assert groups is not None
        canary = version.canary.to_wire() if version.canary is not None else None
        buckets.take(0)  # before the event, with which the members' deadlines begin
        started = time.perf_counter()
        self._post_event({"kind": "send", "policy_version": version.policy_version, "canary": canary})
        nbytes, prints = send(groups, version, buckets, self._link.place, self._buffers)
        post(self._store, f"{self._epoch}/prints/{self._event}", prints)
        return {"wire_s": time.perf_counter() - started, "wire_bytes": float(nbytes)}
