"""Wakes a thread that polls sockets, from any other thread, by a pair of sockets inside the process."""

from __future__ import annotations

import contextlib

import zmq


class Wakeup:
    """`ring` must be called under a lock of the caller, `heard` in the thread that polls `inside`."""

    def __init__(self, context: zmq.Context) -> None:
        # Both ends are created here: an inproc peer may connect before the thread binds, but the thread could not
        # create its end in a closed context.
        self._outside = context.socket(zmq.PAIR)
        self.inside = context.socket(zmq.PAIR)
        self.inside.bind("inproc://wakeup")
        self._outside.connect("inproc://wakeup")
        self._rung = False

    def ring(self) -> None:
        """Wake the thread, once for everything that it will find when it wakes up."""
        if self._rung:
            return
        self._rung = True
        with contextlib.suppress(zmq.Again):  # there is no peer: the thread has ended
            self._outside.send(b"", zmq.DONTWAIT)

    def heard(self) -> None:
        """Clear the signal. The thread calls it before it reads its input, so that anything later wakes it again."""
        while self.inside.poll(0):
            self.inside.recv()
        self._rung = False

    def close(self) -> None:
        """Close the caller's end; the thread closes its own."""
        self._outside.close(0)
