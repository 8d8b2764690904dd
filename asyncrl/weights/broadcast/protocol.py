"""What publisher and subscriber say to each other through the store, besides the weights themselves.

hello/W/I                subscriber: idle, invite me (hello: n-th time; width: as many ranks)
invite/W/I/n             publisher: epoch, rank (its first one), world, manifest
E/accept/rank            subscriber: coming
E/go                     publisher: all accepted, form the group ("no": say hello again)
E/event/k                publisher: "send" a version now, "next" (group is re-formed: say hello), "bye"
E/prints/k               publisher: fingerprints of what it sent as event k
E/ack/k/rank             subscriber: "ok" served (and proven, if it was due); "bad" bytes differ; "fail" the engine
                         refused them; "unproven" the canary failed
E/beat/k/rank            subscriber: counter, still loading
"""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack
import torch.distributed as dist

from asyncrl.errors import WeightsError

POLL_S = 0.003
FIRST_POLL_S = 0.0003


def post(store: dist.Store, key: str, message: Any) -> None:
    store.set(key, msgpack.packb(message))  # pyright: ignore[reportArgumentType]


def fetch(store: dist.Store, key: str) -> Any:
    return msgpack.unpackb(store.get(key))


def wait_key(store: dist.Store, key: str, wait_s: float, stop: threading.Event | None = None) -> bool:
    """Poll for `key` for at most `wait_s`; true when it is there. (The store's own wait logs every timeout.)"""
    deadline = time.monotonic() + wait_s
    pause_s = FIRST_POLL_S  # soon at first, for small models; seldom later, since every member asks the one store
    while not store.check([key]):
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            return False
        time.sleep(pause_s)
        pause_s = min(POLL_S, 1.3 * pause_s)
    return True


def wait_answer(
    store: dist.Store, ack: str, beat: str, *, who: str, timeout_s: float, alive: Callable[[], bool]
) -> tuple[str, Any]:
    """The verdict under `ack`, and what goes with it. Waits for `who` as long as it beats every `timeout_s`.

    Args:
        alive: whether the replay server still knows it; the dead are not waited for.

    Raises:
        WeightsError: it is silent, or gone.
    """
    last = store.add(beat, 0)
    deadline = time.monotonic() + timeout_s
    while not wait_key(store, ack, min(0.5, timeout_s)):
        count = store.add(beat, 0)
        if count != last:
            last, deadline = count, time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise WeightsError(f"waited {timeout_s} s for {who} to acknowledge")
        elif not alive():
            raise WeightsError(f"{who} died before it could acknowledge")
    verdict, detail = fetch(store, ack)
    for used in (ack, beat):
        store.delete_key(used)
    return verdict, detail


def hello_key(worker: str, incarnation: str) -> str:
    return f"hello/{worker}/{incarnation}"


def invite_key(worker: str, incarnation: str, hello: int) -> str:
    return f"invite/{worker}/{incarnation}/{hello}"
