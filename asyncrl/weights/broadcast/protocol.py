"""Messages between publisher and subscriber through the store, besides the weights themselves.

hello/W/I                subscriber: idle, invite me (hello: n-th time; width: number of its ranks; wanted: by each of
                         them, empty if all want whole tensors; protocol: version of its protocol)
invite/W/I/n             publisher: epoch, rank (the first one), world, manifest, plan (empty: all get all
                         of it)
E/accept/rank            subscriber: coming
E/go                     publisher: all accepted, form the group ("no": say hello again)
E/event/k                publisher: "send" a version now, "tick" (still here), "next" (group is re-formed: say hello),
                         "bye"
E/forgotten              publisher: counter of the events that were deleted, the oldest first
E/prints/k               publisher: fingerprints of what it sent as event k
ack/W/I                  subscriber: its newest answer, with epoch and event: "ok" served (and verified, if it was due);
                         "bad" bytes differ; "fail" the engine refused them; "unproven" the canary failed
E/acked/k                subscribers: counter of those that answered
beat/W/I                 subscriber: counter, still loading

Messages that may take long are pushed: the store itself answers a subscriber's `wait`, and a tick every second keeps
those waits short. The publisher, of which there is one, polls; so do the first messages between two processes that do
not know each other yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import msgpack
import torch.distributed as dist

from asyncrl.errors import WeightsError

PROTOCOL = 7
"""Version of this protocol, on the board and in every hello. 2: several senders, a group for each. 3: fingerprints of
leaves. 4: parts of tensors. 5: sockets. 6: chains. 7: one sender. A peer with another
version is refused with a message, at both ends."""
POLL_S = 0.003
"""Longest pause between two polls of the publisher, in seconds."""
_FIRST_POLL_S, _LAST_POLL_S, _POLL_SHARE = 0.0003, 0.1, 0.05
"""Bounds of the pause between two polls, in seconds, and the pause as a fraction of the time waited already: short for
small models, and long after a long silence, since every member polls the one store."""
TICK_S = 1.0
_SLICE_S = 5.0
"""Longest wait that the store answers, in seconds; it ends no earlier, and torch logs two lines when it times out. A
tick comes before that."""
_LOOK_S = 0.5
"""Seconds between two looks at the heartbeats of members that have not answered."""

Peer = tuple[str, str]
"""(worker, incarnation)."""


def post(store: dist.Store, key: str, message: Any) -> None:
    store.set(key, msgpack.packb(message))  # pyright: ignore[reportArgumentType]


def fetch(store: dist.Store, key: str) -> Any:
    return msgpack.unpackb(store.get(key))


def wait_key(store: dist.Store, key: str, wait_s: float, stop: threading.Event | None = None) -> bool:
    """Poll for `key` for at most `wait_s`; returns whether it exists. (The store's own wait logs every timeout.)"""
    began = time.monotonic()
    while not store.check([key]):
        waited = time.monotonic() - began
        if waited > wait_s or (stop is not None and stop.is_set()):
            return False
        time.sleep(min(_LAST_POLL_S, max(_FIRST_POLL_S, _POLL_SHARE * waited)))
    return True


def pushed(store: dist.Store, key: str, wait_s: float, stop: threading.Event) -> Any:
    """Return the value of `key` as soon as the store has it; None after `wait_s`. `stop` is checked every 5 s.

    Raises:
        dist.DistError: the store is gone.
    """
    deadline = time.monotonic() + wait_s
    while not stop.is_set() and (left := min(deadline - time.monotonic(), _SLICE_S)) > 0.0:
        began = time.monotonic()
        store.set_timeout(timedelta(seconds=max(left, 0.001)))  # torch turns less than 1 ms into 0, and returns at once
        try:
            return fetch(store, key)
        except dist.DistStoreError:
            if time.monotonic() - began < left / 2:
                raise  # not a timeout: the same call would fail again at once
    return None


def introduce(store: dist.Store, peer: Peer) -> None:
    """Create the peer's keys. Keys that are read of all members at once must exist for each: the store waits for
    missing ones."""
    store.add(_beat_key(peer), 0)
    store.set(_ack_key(peer), msgpack.packb([0, 0, "", None]))  # pyright: ignore[reportArgumentType]


def introduced(store: dist.Store, peer: Peer) -> bool:
    return store.check([_beat_key(peer)])


def beat(store: dist.Store, peer: Peer) -> None:
    store.add(_beat_key(peer), 1)


def answer(store: dist.Store, peer: Peer, epoch: int, event: int, verdict: str, detail: Any) -> None:
    post(store, _ack_key(peer), [epoch, event, verdict, detail])
    store.add(f"{epoch}/acked/{event}", 1)


def collect(
    store: dist.Store,
    peers: Sequence[Peer],
    *,
    epoch: int,
    event: int,
    timeout_s: float,
    live: Callable[[], Collection[Peer]],
    meanwhile: Callable[[], None],
) -> list[tuple[str, Any]]:
    """Return the verdicts of all `peers` on an event, each with its detail. Waits for a peer as long as it sends a
    heartbeat every `timeout_s`.

    Args:
        live: returns the peers that the replay server still knows; dead ones are not waited for.
        meanwhile: called on every poll.

    Raises:
        WeightsError: a peer is silent, or gone.
    """
    counter = f"{epoch}/acked/{event}"
    asked = [_ack_key(peer) for peer in peers] + [_beat_key(peer) for peer in peers]
    beats = [b""] * len(peers)
    deadlines = [0.0] * len(peers)
    look, pause_s = 0.0, _FIRST_POLL_S
    while peers:
        now = time.monotonic()
        if store.add(counter, 0) >= len(peers) or now >= look:
            look = now + _LOOK_S
            found = store.multi_get(asked)
            answers, before, beats = [msgpack.unpackb(said) for said in found[: len(peers)]], beats, found[len(peers) :]
            missing = [i for i, said in enumerate(answers) if said[:2] != [epoch, event]]
            if not missing:
                store.delete_key(counter)
                return [(verdict, detail) for _, _, verdict, detail in answers]
            known = set(live())
            for i in missing:
                if beats[i] != before[i]:
                    deadlines[i] = now + timeout_s
                elif now > deadlines[i]:
                    raise WeightsError(f"waited {timeout_s} s for {peers[i][0]} to acknowledge")
                elif peers[i] not in known:
                    raise WeightsError(f"{peers[i][0]} died before it could acknowledge")
        meanwhile()
        time.sleep(pause_s)
        pause_s = min(POLL_S, 1.3 * pause_s)
    return []


def other_version(ours: str, theirs: str, protocol: object) -> str:
    """Return the refusal of another protocol version; empty if they match. Versions before the first number send
    none."""
    if protocol == PROTOCOL:
        return ""
    return (
        f"{theirs} speaks version {protocol or 1} of the handshake for weights, {ours} version {PROTOCOL}: they have "
        "different versions of asyncrl. Install one version on both and start again"
    )


def hello_key(worker: str, incarnation: str) -> str:
    return f"hello/{worker}/{incarnation}"


def forgotten_key(epoch: int) -> str:
    return f"{epoch}/forgotten"


def _ack_key(peer: Peer) -> str:
    return "/".join(("ack", *peer))


def _beat_key(peer: Peer) -> str:
    return "/".join(("beat", *peer))


def invite_key(worker: str, incarnation: str, hello: int) -> str:
    return f"invite/{worker}/{incarnation}/{hello}"
