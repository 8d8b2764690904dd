"""What publisher and subscriber say to each other through the store, besides the weights themselves.

hello/W/I = n            subscriber: idle, invite me (n-th time)
invite/W/I/n             publisher: epoch, rank, world, manifest
E/accept/rank            subscriber: coming
E/go                     publisher: all accepted, form the group ("no": say hello again)
E/event/k                publisher: "send" a version now, "next" (group is re-formed: say hello), "bye"
E/prints/k               publisher: fingerprints of what it sent as event k
E/ack/k/rank             subscriber: "ok" served; "bad" bytes differ; "fail" the engine refused them
E/beat/k/rank            subscriber: counter, still loading
"""

# torch documents its stores at `torch.distributed` but does not list them in `__all__`.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import threading
import time
from typing import Any

import msgpack
import torch.distributed as dist

POLL_S = 0.003


def post(store: dist.Store, key: str, message: Any) -> None:
    store.set(key, msgpack.packb(message))  # pyright: ignore[reportArgumentType]


def fetch(store: dist.Store, key: str) -> Any:
    return msgpack.unpackb(store.get(key))


def wait_key(store: dist.Store, key: str, wait_s: float, stop: threading.Event | None = None) -> bool:
    """Poll for `key` for at most `wait_s`; true when it is there. (The store's own wait logs every timeout.)"""
    deadline = time.monotonic() + wait_s
    while not store.check([key]):
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            return False
        time.sleep(POLL_S)
    return True


def hello_key(worker: str, incarnation: str) -> str:
    return f"hello/{worker}/{incarnation}"


def invite_key(worker: str, incarnation: str, hello: int) -> str:
    return f"invite/{worker}/{incarnation}/{hello}"
