"""A publisher's machine that vanishes without a word, in a network namespace of its own.

unshare -rn python -m tests.weights.vanishing     prints the seconds until a member of the group has noticed
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import torch.distributed as dist

from asyncrl.weights.broadcast.group import connect_store, host_store
from asyncrl.weights.broadcast.protocol import pushed

TIMEOUT_S = 4.0


def lo(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def main() -> int:
    lo("up")
    store, port = host_store("127.0.0.1", TIMEOUT_S)
    member = connect_store("127.0.0.1", port, TIMEOUT_S)
    store.set("here", "")
    member.get("here")
    lo("down")  # what was sent is lost, and nothing refuses it
    began = time.monotonic()
    try:
        while pushed(member, "event", 600.0, threading.Event()) is None:
            pass
    except dist.DistError:
        print(f"{time.monotonic() - began:.1f}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
