"""Peers that outlived their server. With `overwrite=true` they decide whether the journal that is there is an earlier
run's, or that of the run which a supervisor has just started this server again for.

consumes      what comes to the bound socket while nothing answers there; whoever sent it asks again
waits for     one message of that run
unblocked by  it, the deadline, or `stop`
"""

from __future__ import annotations

import threading
import time

import zmq

from asyncrl.errors import WireError
from asyncrl.replay import wire
from asyncrl.replay.socket_options import receive_routed

TURN_S = 0.2


def speaks_of(run_id: str, socket: zmq.Socket, wait_s: float, stop: threading.Event) -> bool:
    """Whether a peer of that run is heard within `wait_s`. When told to stop nobody knows, and it is taken to go on."""
    until = time.monotonic() + wait_s
    while not stop.is_set():
        left = until - time.monotonic()
        if left <= 0:
            return False
        if socket.poll(int(min(left, TURN_S) * 1000) + 1) and _run_of_next(socket) == run_id:
            return True
    return True


def _run_of_next(socket: zmq.Socket) -> str:
    """The run that the next message names; empty where it names none."""
    try:
        _, frames = receive_routed(socket)
        return wire.decode_envelope(frames[0]).run if frames else ""
    except (zmq.Again, WireError):
        return ""
