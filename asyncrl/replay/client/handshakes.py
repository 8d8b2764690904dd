"""Explains why a connection cannot be established, from libzmq's events about handshakes.

A handshake refused by the server (its list does not have the key) is final: libzmq itself does not try again. One
broken off by the server means that it holds another key than the expected one, or just died; libzmq keeps trying, as if
nobody were listening.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
DONE = zmq.EVENT_HANDSHAKE_SUCCEEDED
SUSPICIOUS = 5
"""Number of consecutive broken handshakes that is suspicious. A server that dies during a handshake breaks off another
one only after it is back."""


class Handshakes:
    """Handshakes of one socket. `monitor` must be polled with the socket, and `hear` called when it is readable."""

    def __init__(self, socket: zmq.Socket, keys: str, role: str) -> None:
        self._socket = socket
        self._whose = f"the {role}'s key in {keys}"
        self.monitor: zmq.Socket = socket.get_monitor_socket(REFUSED | BROKEN | DONE)
        self._broken = 0
        self.refused = ""
        """Why no message can ever arrive; empty while one may."""

    def hear(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event & REFUSED:
                self.refused = f"refused {self._whose}. Give every process the same run.dir, or the same replay.keys"
            self._broken = 0 if event & DONE else self._broken + 1

    @property
    def suspicion(self) -> str:
        """What may be wrong if the server does not answer; empty if nothing is suspicious."""
        if self._broken < SUSPICIOUS:
            return ""
        return (
            f"; the process that listens there has other keys than those beside {self._whose}. Either it belongs to "
            "another run, or run.dir or replay.keys differ between here and there"
        )

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
