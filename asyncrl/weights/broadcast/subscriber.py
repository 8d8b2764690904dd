"""Broadcast transport, worker end: hello -> join the epoch -> receive, verify, load, acknowledge -> repeat.

Consumes the events of one epoch; waits for the publisher's store, and checks the board in case another publisher has
taken over; unblocked by both. Until a version is verified and loaded, the engine serves the old one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import (
    AsyncRLError,
    ConfigError,
    EngineDiedError,
    ModelMismatchError,
    OtherVersionError,
    WeightsError,
)
from asyncrl.weights.base import LoadWeights, SubscriberRendezvous
from asyncrl.weights.broadcast.group import connect_store
from asyncrl.weights.broadcast.local_wire import OTHER_MACHINE
from asyncrl.weights.broadcast.protocol import (
    PROTOCOL,
    answer,
    beat,
    fetch,
    forgotten_key,
    hello_key,
    introduce,
    invite_key,
    other_version,
    post,
    pushed,
    wait_key,
)
from asyncrl.weights.broadcast.staging import Receiver, Seat, Staging
from asyncrl.weights.canary import Proof
from asyncrl.weights.fingerprint import chain
from asyncrl.weights.ipc import machine
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.sliced import wanted_to_wire
from asyncrl.weights.subscriber import Subscriber

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two checks of the board while there is no invitation."""
_SILENCE_S = 5.0
"""Seconds without an event or a tick, until the board is checked for another publisher."""


class BroadcastSubscriber(Subscriber):
    """`receiver` is where the bytes are received; without one, in this
    process."""

    def __init__(
        self,
        rendezvous: SubscriberRendezvous,
        load: LoadWeights,
        *,
        worker: str,
        incarnation: str,
        timeout_s: float,
        interface: str = "",
        receiver: Receiver | None = None,
        proof: Proof | None = None,
        stall_s: Callable[[], float] | None = None,
        admit: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        super().__init__(rendezvous, load, "subscriber", proof, stall_s)
        self._admit = admit
        self._me = worker, incarnation
        self._timeout_s, self._interface = timeout_s, interface
        self._receiver = receiver or Staging()
        self._revision = -1
        self._board: dict[str, Any] = {}
        self._hello = 0
        self._lost = ""
        self._proven_publisher = ""
        self._thread.start()

    def _run(self) -> None:
        # Waits for a publisher for as long as this worker lives: without one there is nothing to do.
        while not self._closed.is_set():
            self._look(wait_s=0.0 if self._board else _LOOK_S)
            if self._board.get("transport") != "broadcast":
                self._closed.wait(0.05)
                continue
            if self._board["publisher"] != self._proven_publisher:
                # A new publisher counts epochs from the start: one may have the number of the last verified epoch.
                self._proven_publisher, self._proven_epoch = self._board["publisher"], -1
            try:
                store = connect_store(self._board["host"], int(self._board["port"]), self._timeout_s)
                # Only of a learner that is there: the replay server restores the board from its journal, so that a
                # resumed run begins with what the learner before it announced, of another version or before a reboot.
                if (refusal := self._refusal()) is not None and not self._look(wait_s=_LOOK_S):
                    raise refusal
                if refusal is None:
                    self._attend(store)
            except (ModelMismatchError, OtherVersionError):
                raise
            except (WeightsError, dist.DistError) as error:
                if self._lost != self._board["publisher"]:
                    self._lost = self._board["publisher"]
                    self._stats["lost_publisher"] += 1
                    log.warning("weights: publisher lost (%s); still serving version %d", error, self._policy_version)
            self._closed.wait(0.2)

    def _refusal(self) -> OtherVersionError | ConfigError | None:
        """Return why this worker cannot follow the learner on the board, if it cannot."""
        if said := other_version("this worker", "the learner", self._board.get("protocol")):
            return OtherVersionError(said)
        if self._board.get("machine") and self._board["machine"] != machine():
            return ConfigError(f"this worker is not on the learner's machine, or in another container: {OTHER_MACHINE}")
        return None

    def _look(self, wait_s: float) -> bool:
        """Read the board; returns whether the publisher on it has changed."""
        before = self._board.get("publisher")
        board = self._rendezvous.watch(self._revision, wait_s)
        self._revision, self._board = board.revision, dict(board.values.get("weights") or {})
        return self._board.get("publisher") != before

    def _attend(self, store: dist.TCPStore) -> None:
        """Follow one publisher epoch after epoch; returns when there is another, raises when it is gone."""
        introduce(store, self._me)
        while not self._closed.is_set():
            width = self._receiver.width  # read once: the last of its processes may go at any time
            if not width:  # with a seat of no ranks it could not answer, and all would wait for it
                if self._look(wait_s=_LOOK_S):
                    return
                store.check(["alive"])
                continue
            invite = self._say_hello(store, width, [wanted_to_wire(each) for each in self._receiver.wanted()])
            if invite is None:
                return
            if "refused" in invite:
                raise OtherVersionError(str(invite["refused"]))
            if self._admit is not None:
                self._admit(Manifest.from_wire(invite["manifest"]).shapes())
            epoch, rank = int(invite["epoch"]), int(invite["rank"])
            post(store, f"{epoch}/accept/{rank}", True)
            if not pushed(store, f"{epoch}/go", self._timeout_s, self._closed):
                continue
            if not self._join(store, invite):
                return
            store.check(["alive"])  # raises if the publisher died, not just another member

    def _join(self, store: dist.TCPStore, invite: dict[str, Any]) -> bool:
        """Follow one epoch, from joining to its end; false when the publisher is done or replaced."""
        seat = Seat(
            host=self._board["host"], port=int(self._board["port"]), backend=self._board["backend"],
            epoch=int(invite["epoch"]), rank=int(invite["rank"]), world=int(invite["world"]),
            timeout_s=self._timeout_s, manifest=invite["manifest"], interface=self._interface,
            plan=invite.get("plan") or [],
        )  # fmt: skip
        try:
            self._receiver.join(seat)
            return self._follow(store, seat)
        except RuntimeError as error:
            if isinstance(error, AsyncRLError):
                raise  # an error of the server or the engine, not of the group
            if not self._closed.is_set():  # otherwise this worker ends, and the error is expected
                log.warning("weights: epoch %d ended: %s", seat.epoch, str(error).splitlines()[0])
            return True
        finally:
            self._receiver.leave()

    def _say_hello(self, store: dist.TCPStore, width: int, wanted: list[Any]) -> dict[str, Any] | None:
        """Wait for the invitation to the next epoch; None when another publisher has taken over."""
        self._hello += 1
        message = {"hello": self._hello, "width": width, "wanted": wanted, "protocol": PROTOCOL}
        post(store, hello_key(*self._me), message)
        store.add("hellos", 1)
        key = invite_key(*self._me, self._hello)
        while not wait_key(store, key, _LOOK_S, self._closed):
            if self._closed.is_set() or self._look(wait_s=0.0):
                return None
        invite = fetch(store, key)
        store.delete_key(key)
        return invite

    def _follow(self, store: dist.TCPStore, seat: Seat) -> bool:
        """Serve one epoch until it ends; false when the publisher said goodbye or another one took over."""
        self._stats["epoch"] = float(seat.epoch)
        self._stats["epochs"] += 1
        number = 1
        while not self._closed.is_set():
            if self._receiver.changed():
                log.info("weights: the engine has new processes; joining again")
                self._fingerprint = ""
                return True
            key = f"{seat.epoch}/event/{number}"
            event = pushed(store, key, _SILENCE_S, self._closed)
            if event is None and store.add(forgotten_key(seat.epoch), 0) >= number:
                log.warning("weights: epoch %d continued without this worker, which joins again", seat.epoch)
                return True
            if event is None or event["kind"] == "tick":
                if self._look(wait_s=0.0):
                    return False
            elif event["kind"] == "send":
                self._receive(store, seat, number, event)
            else:
                store.add(f"{seat.epoch}/gone", 1)
                return event["kind"] == "next"
            number += event is not None
        return False

    def _receive(self, store: dist.TCPStore, seat: Seat, number: int, event: dict[str, Any]) -> None:
        """Receive one version: all bytes into staging, then verify, load, acknowledge."""
        started = time.perf_counter()
        policy_version = int(event["policy_version"])
        prints = self._receiver.receive(event)
        expected = pushed(store, f"{seat.epoch}/prints/{number}", self._timeout_s, self._closed)
        if expected is None:
            raise RuntimeError(f"waited {self._timeout_s} s for the fingerprints of version {policy_version}")
        self._stats["receive_s"] += time.perf_counter() - started
        said = partial(answer, store, self._me, seat.epoch, number)
        differing = [
            i for i, (ours, theirs) in enumerate(zip(prints, expected, strict=True)) if ours not in ("", theirs)
        ]
        if differing:
            self._stats["nacks"] += 1
            said("bad", f"buckets {differing} differ")
            return
        try:
            report = self._serve(
                policy_version, chain(expected), self._receiver.staged(), partial(beat, store, self._me),
                canary=event.get("canary"), epoch=seat.epoch,
            )  # fmt: skip
        except (WeightsError, EngineDiedError) as error:
            refuted = isinstance(error, WeightsError) and not self.proven
            said("unproven" if refuted else "fail", str(error))
            self._failure = error
            self._closed.set()
            return
        said("ok", report)
