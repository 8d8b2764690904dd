"""Why a connection does not come to be: what libzmq says about handshakes, in words.

Refused by the server (its list has no such key): final, libzmq itself does not try again. Broken off by the server: it
holds another key than the one it is looked for by, or it just died; tried again and again, as if nobody were there.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import parse_monitor_message

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
DONE = zmq.EVENT_HANDSHAKE_SUCCEEDED
SUSPICIOUS = 5
"""In a row. A server that dies in the middle of one breaks off another only when it is back."""


class Handshakes:
    """Those of one socket; `monitor` is to be polled with it, and `hear` called when it is readable."""

    def __init__(self, socket: zmq.Socket, keys: str, role: str) -> None:
        self._socket = socket
        self._whose = f"the {role}'s key in {keys}"
        self.monitor: zmq.Socket = socket.get_monitor_socket(REFUSED | BROKEN | DONE)
        self._broken = 0
        self.refused = ""
        """Why no word will ever come; empty while one may."""

    def hear(self) -> None:
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.DONTWAIT))["event"]
            if event & REFUSED:
                self.refused = f"refused {self._whose}. Give every process the same run.dir, or the same replay.keys"
            self._broken = 0 if event & DONE else self._broken + 1

    @property
    def suspicion(self) -> str:
        """What may be wrong, when nobody answers."""
        if self._broken < SUSPICIOUS:
            return ""
        return (
            f"; who listens there has other keys than those beside {self._whose}: it is another run's, or run.dir or "
            "replay.keys is another one here than there"
        )

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
