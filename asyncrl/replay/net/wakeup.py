"""How any thread wakes the one that waits at a socket: a pair of sockets inside the process."""

from __future__ import annotations

import contextlib

import zmq


class Wakeup:
    """`ring` is called under a lock of the caller's, `heard` in the thread that polls `inside`."""

    def __init__(self, context: zmq.Context) -> None:
        # Both ends are made here: an inproc peer that connects before the thread binds is fine, but a closed context in
        # the thread would not be.
        self._outside = context.socket(zmq.PAIR)
        self.inside = context.socket(zmq.PAIR)
        self.inside.bind("inproc://wakeup")
        self._outside.connect("inproc://wakeup")
        self._rung = False

    def ring(self) -> None:
        """Once for all that the thread will find when it wakes up."""
        if self._rung:
            return
        self._rung = True
        with contextlib.suppress(zmq.Again):  # no peer: the thread has ended
            self._outside.send(b"", zmq.DONTWAIT)

    def heard(self) -> None:
        """Before the thread looks at what there is: what comes from now on wakes it up again."""
        while self.inside.poll(0):
            self.inside.recv()
        self._rung = False

    def close(self) -> None:
        """The caller's end; the thread closes its own."""
        self._outside.close(0)
