"""Several learner ranks send one version: rank 0 conducts, each sends its share in a group of its own.

    rank 0   take(v) -> form(epoch) -> send(event) -> all prints are there -> subscribers, which wait for them, load
    others     |          accept, join     share of v, then its prints

Orders are a numbered sequence in the publisher's store (`order/k`), so a rank that is late misses none. Subscribers see
one publisher: they join one group per sender, and get the fingerprints only once all have sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import torch.distributed as dist
import xxhash

from asyncrl.errors import WeightsError, WeightsGoneError
from asyncrl.weights.broadcast.forming import Forming
from asyncrl.weights.broadcast.group import WeightGroup, connect_store, store_of_epoch
from asyncrl.weights.broadcast.protocol import Peer, answer, beat, collect, introduce, post, pushed, wait_key
from asyncrl.weights.broadcast.reach import Round, name_of
from asyncrl.weights.broadcast.sending import Lanes, send
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.flows import Flows
from asyncrl.weights.publishing.reading import Rooms
from asyncrl.weights.publishing.snapshot import Snapshot
from asyncrl.weights.shares import RANK0

log = logging.getLogger(__name__)

_KEPT_ORDERS = 256
_LOOK_S = 60.0
_BEAT_S = 1.0
_TICK_S = 2.0
"""Seconds between two orders: torch logs two lines when a wait in the store times out after `protocol.pushed`'s 5 s."""
_GRACE = 2.0
"""Multiple of `weights.timeout_s` that the go-ahead may take after an order to form, since it waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Address of rank 0's store, and the publisher's identity."""

    host: str
    port: int
    publisher: str


_MEETING_BYTES = 1024


def agree(meeting: Meeting | None, device: torch.device) -> Meeting:
    """Return rank 0's meeting on every rank. Collective over torch's default group, whose backend sends from
    `device`."""
    said = torch.zeros(_MEETING_BYTES, dtype=torch.uint8)
    if meeting is not None:
        packed = msgpack.packb([meeting.host, meeting.port, meeting.publisher])
        assert packed is not None
        said[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    said = said.to(device)
    dist.broadcast(said, 0)
    unpacker = msgpack.Unpacker()
    unpacker.feed(bytes(said.tolist()))
    host, port, publisher = unpacker.unpack()
    return Meeting(host=host, port=port, publisher=publisher)


def sender_of(rank: int, publisher: str) -> Peer:
    return f"learner rank {rank}", publisher


class OtherSenders:
    """Rank 0's view of the ranks 1.. that send with it; does nothing if there are none."""

    def __init__(self, store: dist.Store, senders: int, publisher: str, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._peers = [sender_of(rank, publisher) for rank in range(1, senders)]
        self._number = 0
        self._ordered_at = 0.0

    def tick(self) -> None:
        """Called while there is nothing to order; before the first version no rank waits."""
        if self._number and time.monotonic() >= self._ordered_at + _TICK_S:
            self._order({"kind": "tick"})

    def take(self, policy_version: int) -> None:
        """The previous version is not needed any more."""
        self._order({"kind": "take", "policy_version": policy_version})

    @property
    def names(self) -> list[str]:
        return [name_of(peer) for peer in self._peers]

    def reach(self, epoch: int, names: Sequence[str]) -> None:
        """Order that they try to reach all members."""
        self._order({"kind": "reach", "epoch": epoch, "names": names})

    def form(self, epoch: int, flows: Flows | None) -> None:
        """Order the group of an epoch. Raises WeightsError if a rank does not come: without it no version is
        complete."""
        self._order({"kind": "form", "epoch": epoch, "flows": flows.to_wire() if flows is not None else []})
        deadline = time.monotonic() + self._timeout_s
        for rank, (name, _) in enumerate(self._peers, 1):
            if not wait_key(self._store, _accept_key(epoch, rank), max(deadline - time.monotonic(), 0.0)):
                post(self._store, f"{epoch}/go", False)
                raise WeightsError(
                    f"{name} did not start to send its share within weights.timeout_s={self._timeout_s:g}: see its log"
                )

    def formed(self, epoch: int, snapshot: Snapshot) -> None:
        """Wait until all groups are formed. Raises RuntimeError if one is not, or a rank has another plan of who sends
        what; ApartError if a subscriber has no connection in one."""
        own = _digest(snapshot) if self._peers else ""
        try:
            digests = self._collect(epoch, 0)
        except RuntimeError:
            # Which subscriber it was, or that one would be invited to each further epoch, and break it for all.
            Forming(store_of_epoch(self._store, epoch)).look()
            raise
        for (name, _), digest in zip(self._peers, digests, strict=True):
            if digest != own:
                raise RuntimeError(f"{name} has a different plan of which rank sends what. {RANK0}")

    def send(self, epoch: int, event: int, policy_version: int) -> None:
        self._order({"kind": "send", "epoch": epoch, "event": event, "policy_version": policy_version})

    def sent(self, epoch: int, event: int) -> list[tuple[list[str], int]]:
        """Return the fingerprints and bytes of each rank, once all have sent. Raises RuntimeError if one could not, or
        is silent; WeightsGoneError if one has changed its weights already."""
        return [(prints, int(nbytes)) for prints, nbytes in self._collect(epoch, -event)]

    def give_up(self) -> None:
        """No receiver is present, or all have received it: no rank need keep its weights unchanged."""
        self._order({"kind": "give up"})

    def leave(self) -> None:
        self._order({"kind": "leave"})

    def end(self) -> None:
        self._order({"kind": "end"})

    def _order(self, message: Mapping[str, Any]) -> None:
        if not self._peers:
            return
        self._number += 1
        self._ordered_at = time.monotonic()
        post(self._store, f"order/{self._number}", message)
        if self._number > _KEPT_ORDERS:
            self._store.delete_key(f"order/{self._number - _KEPT_ORDERS}")

    def _collect(self, epoch: int, event: int) -> list[Any]:
        """Collect the answers. The events of senders have numbers below those of the subscribers."""
        answers = collect(
            self._store, self._peers, epoch=epoch, event=event, timeout_s=self._timeout_s,
            live=lambda: self._peers, meanwhile=self.tick,
        )  # fmt: skip
        for (name, _), (verdict, detail) in zip(self._peers, answers, strict=True):
            if verdict == "gone":
                raise WeightsGoneError(f"{name}: {detail}")
            if verdict != "ok":
                raise RuntimeError(f"{name}: {detail}")
        return [detail for _, detail in answers]


class ShareSender:
    """Implements `snapshot.Sender` on the other ranks: sends what this rank holds when rank 0 orders it.

    Raises:
        WeightsError: rank 0's store does not answer.
    """

    keeps_previous = False

    def __init__(self, meeting: Meeting, rank: int, link: Link) -> None:
        self._meeting, self._rank, self._link = meeting, rank, link
        self._store = connect_store(meeting.host, meeting.port, link.timeout_s)
        self._me = sender_of(rank, meeting.publisher)
        self._number = 1
        self._over = False
        self._never = threading.Event()
        self._lanes: Lanes | None = None
        self._rooms = Rooms(link.place, shared=link.backend == "ipc")
        self._beat_at = 0.0
        introduce(self._store, self._me)

    @property
    def sends_buckets(self) -> bool:
        return self._lanes is None or not self._lanes.parts

    def send(self, snapshot: Snapshot, previous: Snapshot | None = None) -> None:
        """Carry out rank 0's orders for this version, until it takes the next one.

        Waits for rank 0 as long as it lives: unblocked by its next order, or by its store, which goes with it.
        """
        while (order := self._next_order()) is not None:
            if order["kind"] == "take" and order["policy_version"] > snapshot.policy_version:
                return
            if order["kind"] == "form":
                self._form(int(order["epoch"]), order["flows"], snapshot)
            elif order["kind"] == "reach":
                tried = Round(self._store, int(order["epoch"]), order["names"])
                tried.take_part(name_of(self._me), self._link, self._never)
            elif order["kind"] == "send":
                self._transmit(int(order["epoch"]), int(order["event"]), int(order["policy_version"]), snapshot)
            elif order["kind"] == "give up" and snapshot.reading is not None:
                snapshot.reading.give_up()
            elif order["kind"] in ("leave", "end"):
                self._leave()
                self._over = order["kind"] == "end"

    def idle(self, newest: Snapshot | None) -> None:
        """Nothing to do: orders for a version are read once it is there."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._leave()

    def _next_order(self) -> Mapping[str, Any] | None:
        """Return None if rank 0 has ended, or died."""
        try:
            while not self._over:
                order = pushed(self._store, f"order/{self._number}", _LOOK_S, self._never)
                if order is not None:
                    self._number += 1
                    return order
        except dist.DistError as error:
            log.warning("weights: rank 0, which coordinates the senders, is gone: %s", str(error).splitlines()[0])
            self._over = True
        return None

    def _form(self, epoch: int, flows: list[Any], snapshot: Snapshot) -> None:
        self._leave()
        post(self._store, _accept_key(epoch, self._rank), True)
        if not pushed(self._store, f"{epoch}/go", _GRACE * self._link.timeout_s, self._never):
            return

        def group(name: str, world: int) -> WeightGroup:
            store = connect_store(self._meeting.host, self._meeting.port, self._link.timeout_s)
            return WeightGroup(store, self._link, epoch=epoch, rank=0, world=world, name=name)

        try:
            planned = Flows.from_wire(flows, snapshot.whole)
            self._lanes = Lanes.form(group, self._rank, planned, snapshot, 0)
        except RuntimeError as error:
            answer(self._store, self._me, epoch, 0, "failed", str(error).splitlines()[0])
        else:
            answer(self._store, self._me, epoch, 0, "ok", _digest(snapshot))

    def _transmit(self, epoch: int, event: int, policy_version: int, snapshot: Snapshot) -> None:
        why, verdict, lanes, nbytes, prints = "", "failed", self._lanes, 0, list[str]()
        try:
            if lanes is None or policy_version != snapshot.policy_version:
                raise WeightsError(
                    f"asked for version {policy_version} in epoch {epoch}: it has {snapshot.policy_version}"
                    + (", and no group" if lanes is None else "")
                )
            with snapshot.open():
                nbytes, prints = send(lanes, snapshot, self._rooms, self._beat)
        except RuntimeError as error:
            why, verdict = str(error).splitlines()[0], "gone" if isinstance(error, WeightsGoneError) else "failed"
        lanes = None  # an exception's frames would keep its groups alive, with open sockets
        if why:
            self._leave()
            answer(self._store, self._me, epoch, -event, verdict, why)
        else:
            answer(self._store, self._me, epoch, -event, "ok", [prints, nbytes])

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + _BEAT_S
            beat(self._store, self._me)

    def _leave(self) -> None:
        lanes, self._lanes = self._lanes, None
        if lanes is not None:
            lanes.abort()


def _digest(snapshot: Snapshot) -> str:
    """Digest of who sends what: a rank that divided the shares differently would send bytes to wrong places."""
    assert snapshot.shares is not None
    boxes = [[list(map(list, share.boxes.items())), share.manifest.to_wire()] for share in snapshot.shares.of]
    packed = msgpack.packb([snapshot.whole.to_wire(), boxes])
    assert packed is not None
    return xxhash.xxh3_128_hexdigest(packed)


def _accept_key(epoch: int, rank: int) -> str:
    return f"{epoch}/sender/{rank}"
